"""``dflash-deploy bench``: any OpenAI-compatible server measured from outside, and result files compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Context
from typer.core import TyperGroup

from dflash_deploy.cli.options import AsJson, Form, Format, ResultOut, tell
from dflash_deploy.errors import ExitCode

_HERE = "http://127.0.0.1:30000"


class _RunByDefault(TyperGroup):
    """``bench URL`` is ``bench run URL``."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:  # type: ignore[override]  # typer's own copy
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunByDefault,
    help="Measure a running server from outside: `bench [URL]` is `bench run [URL]`. Nothing is launched.",
    no_args_is_help=False,
    rich_markup_mode=None,
)


@app.command("run", short_help="Measure a server (the default).")
def run(
    url: Annotated[
        str, typer.Argument(help="Address of the server, with or without /v1.", metavar="[URL]")
    ] = _HERE,
    *,
    against: Annotated[
        str | None,
        typer.Option(
            help="A second live server: both are measured in turn, until it is clear which is faster.",
            metavar="URL",
        ),
    ] = None,
    protocol: Annotated[
        str,
        typer.Option(
            help="How to measure: write-up-single, write-up-four, latency, throughput, soak or "
            "context-ladder. The options below change it.",
            metavar="NAME",
        ),
    ] = "write-up-single",
    users: Annotated[
        str | None,
        typer.Option(help="Requests at once; several levels by comma, as in 1,2,4.", metavar="NUMBERS"),
    ] = None,
    input_tokens: Annotated[
        str | None,
        typer.Option(
            help="With --protocol context-ladder: exact tokens of each prompt; several lengths by comma.",
            metavar="NUMBERS",
        ),
    ] = None,
    output_tokens: Annotated[int | None, typer.Option(min=2, help="Tokens of each answer.")] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Rounds that count, or requests of each user.")
    ] = None,
    cold: Annotated[
        int | None, typer.Option(min=0, max=100, help="Rounds before them, which do not count.")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=1.0, max=86_400.0, help="How long each level of latency, throughput or soak takes."),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="What is asked, with weights: instruction, math, code, prose, tools, long-context, "
            "multi-turn.",
            metavar="TASK[=WEIGHT],…",
        ),
    ] = None,
    workload: Annotated[
        Path | None,
        typer.Option(
            help="Ask from your own file: JSON lines, ShareGPT or OpenAI batch. Where it has max_tokens, "
            "answers end there at the latest, unless --output-tokens is given.",
            metavar="FILE",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Open loop: requests a second at random moments, however many wait for their answers.",
            metavar="PER_S",
        ),
    ] = None,
    arrivals: Annotated[
        Path | None,
        typer.Option(
            help="Open loop: requests at the moments of this file, seconds from the beginning, one a line.",
            metavar="FILE",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="With --rate: of the moments.")] = 0,
    most_rounds: Annotated[
        int, typer.Option(min=1, max=1000, help="With --against: rounds at most, if it stays unclear.")
    ] = 32,
    cached: Annotated[
        bool, typer.Option("--cached", help="Ask the questions as they are, so that a prefix cache may help.")
    ] = False,
    exam: Annotated[
        bool,
        typer.Option("--exam", help="Ask questions with known answers too, and whether answers repeat."),
    ] = False,
    check_output: Annotated[
        bool, typer.Option(help="Judge the answers' texts; off for a model of random weights.")
    ] = True,
    model: Annotated[
        str | None, typer.Option(help="Name to ask for; else the first that the server has.")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the server's key, for its owner alone; else DFLASH_API_KEY.", metavar="FILE"
        ),
    ] = None,
    form: Form = Format.TEXT,
    json: AsJson = False,
    out: ResultOut = None,
    redact: Annotated[
        bool,
        typer.Option("--redact", help="Leave names, addresses, paths, keys and texts out of the result."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Measure a running server: speed, waiting, and whether its answers are sound.

    Any server with OpenAI's chat interface will do: SGLang, vLLM, llama.cpp, Ollama, LM Studio. Tokens are
    those that the server counts, never events of the stream. Exits with 1 when requests failed, answers are
    wrong or nothing could be measured. Ctrl-C keeps what had been measured, and exits with 130.
    """
    from urllib.parse import urlsplit

    from dflash_deploy.bench.against import bench_both
    from dflash_deploy.bench.changes import Changes, changed
    from dflash_deploy.bench.endpoint import Endpoint, discover, read_api_key
    from dflash_deploy.bench.protocols import Options
    from dflash_deploy.bench.redaction import redacted
    from dflash_deploy.bench.results import ResultFile, check_writable, write_result
    from dflash_deploy.bench.standalone import bench
    from dflash_deploy.bench.transport import Address
    from dflash_deploy.bench.workloads import files
    from dflash_deploy.compare.here import look_here, machine_here
    from dflash_deploy.compare.tables import as_csv, as_json, as_markdown, as_text, shown
    from dflash_deploy.tune.signals import stop_once

    if rate and arrivals:
        raise typer.BadParameter("moments are given or at random, not both", param_hint="--arrivals")
    if arrivals and (rounds or seconds):
        raise typer.BadParameter("its file says how many requests come and when", param_hint="--arrivals")
    if against and (rate or arrivals):
        raise typer.BadParameter("an open loop measures one server", param_hint="--rate")
    if against and exam:
        raise typer.BadParameter("examines one server; ask each by itself", param_hint="--exam")
    own = files.read(workload) if workload else None
    if own and output_tokens is None:
        output_tokens = files.longest_answer(own)
    elif own:
        own = files.without_lengths(own)
    open_loop = rate is not None or arrivals is not None
    chosen = changed(
        protocol,
        Changes(users, input_tokens, output_tokens, rounds, cold, seconds, tasks, own is not None, open_loop),
    )
    options = Options(
        prompts=own,
        salt=None if cached else "",
        rate_per_s=rate,
        arrivals_s=files.read_arrivals(arrivals) if arrivals else None,
        seed=seed,
    )
    if out is not None:
        check_writable(out)

    def progress(text: str) -> None:
        if not quiet:
            tell(shown(text))

    def tell_of_proxy(endpoint: Endpoint) -> None:
        if (proxy := Address.parse(endpoint.base_url).proxy) is not None:
            through = f"the proxy {proxy.host}:{proxy.port}"
            progress(f"{endpoint.base_url} is asked through {through}: its delays are in every figure")

    def write(result: ResultFile) -> None:
        if out is not None and any(run.loads for run in result.runs):
            write_result(out, redacted(result) if redact else result)

    def keep(result: ResultFile) -> None:
        try:
            write(result)
        except OSError as error:
            # Room may be made until the end, and what is measured is not given up for it.
            tell(f"{out} cannot be written now: {error.strerror or error}")

    key = read_api_key(api_key_file)
    with stop_once():
        endpoint = discover(url, model=model, api_key=key)
        tell_of_proxy(endpoint)
        here = urlsplit(endpoint.base_url).hostname in ("127.0.0.1", "localhost", "::1")
        machine = machine_here() if here and not endpoint.simulated else None
        look = look_here() if here and not endpoint.simulated else None
        found = None
        if against is None:
            result = bench(
                endpoint,
                chosen,
                options,
                machine=machine,
                gpu=look,
                exam=exam,
                read_text=check_output,
                tell=progress,
                keep=keep,
            )
        else:
            other = discover(against, model=model, api_key=key)
            tell_of_proxy(other)
            result, found = bench_both(
                endpoint,
                other,
                chosen,
                options,
                most_rounds=most_rounds,
                machine=machine,
                read_text=check_output,
                tell=progress,
                keep=keep,
            )
        said = redacted(result) if redact else result
        chosen_form = Format.JSON if json else form
        render = {Format.TEXT: as_text, Format.MARKDOWN: as_markdown, Format.CSV: as_csv}
        text = as_json(said, found) if chosen_form is Format.JSON else render[chosen_form](said)
        try:
            write(result)
        finally:
            # A disk that is full takes the file, and not what is seen.
            typer.echo(text.rstrip("\n"))
        if out is not None and not any(run.loads for run in result.runs):
            tell(f"{out} is not written: nothing was measured")
    if found is not None:
        doubts = "".join(
            f"; but {one.name} is {one.outcome}" for one in result.runs if one.outcome != "served"
        )
        typer.echo(found.sentence("A", "B") + doubts, err=chosen_form is not Format.TEXT)
    if result.interrupted:
        typer.echo("cut short: this is what had been measured", err=True)
        raise typer.Exit(ExitCode.INTERRUPTED)
    if any(one.outcome != "served" or not one.loads for one in result.runs):
        raise typer.Exit(ExitCode.FAILED)


@app.command("compare", short_help="Two result files side by side.")
def compare(
    a: Annotated[Path, typer.Argument(help="Result file, of `bench --out` or `compare --out`.", metavar="A")],
    b: Annotated[Path, typer.Argument(help="The one that it is compared with.", metavar="B")],
    *,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Compare although the two were asked different things.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object (docs/json.md).")] = False,
) -> None:
    """Say which of two measurements is faster, and how sure that is.

    Refuses files whose workloads differ: their figures say nothing about each other.
    """
    from dflash_deploy.bench.results import read_result
    from dflash_deploy.compare.files import as_json, as_text, put_beside
    from dflash_deploy.compare.tables import shown

    beside = put_beside(read_result(a), read_result(b), anyway=anyway)
    for warning in beside.warnings:
        typer.echo(f"warning: {shown(warning)}", err=True)
    typer.echo(as_json(beside) if json else as_text(beside))


@app.command("schema", short_help="The form of result files, as JSON Schema.")
def schema() -> None:
    """Print the JSON Schema of result files, for programs that read them."""
    from json import dumps

    from dflash_deploy.bench.results import ResultFile

    typer.echo(dumps(ResultFile.model_json_schema(), indent=2, ensure_ascii=False))

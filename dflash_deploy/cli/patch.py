"""``dflash-deploy patch``: what an installed SGLang needs changed, applied and undone."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_deploy.errors import DeployError, ExitCode

if TYPE_CHECKING:
    from dflash_deploy.serving_env.patches.bmm import Decision
    from dflash_deploy.serving_env.patches.description import Patch
    from dflash_deploy.serving_env.patches.tree import Tree

app = typer.Typer(
    help="See what an installed SGLang needs changed, change it, and put it back byte for byte.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NAME…]", help="Patches [default: all of them].", show_default=False),
]
_Environment = Annotated[
    str | None,
    typer.Option(
        "--env",
        metavar="ENV",
        help="The environment that serves: its name, its folder, its python or its site-packages folder "
        "[default: the one chosen with `env use`].",
    ),
]
_Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead (docs/json.md lists its keys).")
]
_Probe = Annotated[
    Path | None,
    typer.Option("--probe", metavar="FILE", help="Decide by this record of the FP8 probe (patch measure)."),
]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be changed, and change nothing.")]


@app.command("list")
def list_patches(
    *,
    env: Annotated[
        str | None,
        typer.Option("--env", metavar="ENV", help="Also tell how each stands in this environment."),
    ] = None,
    json: _Json = False,
) -> None:
    """List the patches: what each is for, what upstream did, and its limits."""
    from dflash_deploy.serving_env.patches.verdict import examine
    from dflash_deploy.serving_env.patches.view import (
        SCHEMA_VERSION,
        environment_line,
        here_line,
        patch_json,
        patch_lines,
        tree_json,
    )

    patches = _patches(None)
    tree = None if env is None else _tree(env)
    here = {patch.name: examine(patch, tree).verdict for patch in patches} if tree else {}
    if json:
        listed = [patch_json(patch, here.get(patch.name)) for patch in patches]
        environment = {"environment": tree_json(tree)} if tree else {}
        _print_json({"schema_version": SCHEMA_VERSION, **environment, "patches": listed})
        return
    if tree:
        typer.echo(f"{environment_line(tree)}\n")
    blocks = [
        [*patch_lines(patch), *map(here_line, filter(None, [here.get(patch.name)]))] for patch in patches
    ]
    typer.echo("\n\n".join("\n".join(block) for block in blocks))


@app.command("check")
def check(
    names: _Names = None,
    *,
    env: _Environment = None,
    probe: _Probe = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run the FP8 probe on this machine first (minutes, on the GPU).")
    ] = False,
    live: Annotated[
        bool, typer.Option("--live", help="Have the serving interpreter try what is applied (seconds).")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Do not mend what an earlier run left unfinished; only say so.")
    ] = False,
    json: _Json = False,
) -> None:
    """Tell which patches an environment needs, with the evidence.

    Exits with 0 when nothing is to be done, with 1 when a patch is needed or cannot be told.
    """
    from dflash_deploy.machine.gpu import read_gpus
    from dflash_deploy.serving_env.advice import Case, named
    from dflash_deploy.serving_env.patches import live as serving
    from dflash_deploy.serving_env.patches.operations import mend, unfinished
    from dflash_deploy.serving_env.patches.verdict import VerdictKind, examine
    from dflash_deploy.serving_env.patches.view import (
        SCHEMA_VERSION,
        all_settled,
        environment_line,
        tree_json,
        verdict_json,
        verdict_lines,
    )

    patches = _patches(names)
    tree = _tree(env)
    mended: list[str] = []
    unable: list[str] = []
    if not dry_run:
        try:
            mended = mend(tree)
        except DeployError as error:
            # Whoever may not write there can still be told how it stands.
            unable = [f"it cannot be put in order: {error.message} (fix: {error.fix})"]
    cut_short = unfinished(tree)
    cut_short += unable if cut_short else []
    decision = _decision(tree, probe, measure=measure)[0]
    found = []
    # Which model will be served is not known here: what holds of a quantised head is told.
    cards = tuple(gpu.compute_capability for gpu in read_gpus().readable if gpu.compute_capability)
    case = Case(version=tree.version, capabilities=cards, quantised_head=True, tensor_parallel=2)
    for patch in patches:
        verdict = examine(patch, tree, decision if patch.decided_by else None).verdict
        tried = live and verdict.kind in {VerdictKind.APPLIED, VerdictKind.APPLIED_BY_OTHERS}
        found.append((verdict, serving.check(patch, tree) if tried else None, named(patch.advice, case)))
    if json:
        _print_json(
            {
                "schema_version": SCHEMA_VERSION,
                "environment": tree_json(tree),
                "mended": mended,
                "unfinished": cut_short,
                "patches": [verdict_json(*one) for one in found],
            }
        )
    else:
        typer.echo(environment_line(tree))
        for line in (*mended, *cut_short):
            typer.echo(f"! {line}")
        for one in found:
            typer.echo("\n" + "\n".join(verdict_lines(*one)))
    broken = any(tried is not None and tried.outcome == "failed" for _, tried, _ in found)
    if cut_short or broken or not all_settled([verdict for verdict, *_ in found]):
        raise typer.Exit(ExitCode.FAILED)


@app.command("apply")
def apply(
    names: _Names = None,
    *,
    env: _Environment = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A parameter of the patch, such as backend=cudnn."),
    ] = None,
    probe: _Probe = None,
    unmeasured: Annotated[
        bool, typer.Option("--unmeasured", help="Take --set backend=… as it is, without a measurement.")
    ] = False,
    dry_run: _DryRun = False,
    json: _Json = False,
) -> None:
    """Apply a patch, or all that are needed; the original is kept, and `patch revert` puts it back.

    A patch that a measurement decides is measured first (minutes, on the GPU), unless --probe has the record,
    or --set names SGLang's own choice (backend=cublas): that changes nothing until a server's variable does.
    """
    from dflash_deploy.serving_env.patches import live as serving
    from dflash_deploy.serving_env.patches.bmm import DEFAULT
    from dflash_deploy.serving_env.patches.operations import apply as apply_patch
    from dflash_deploy.serving_env.patches.operations import mend, prepare, revert
    from dflash_deploy.serving_env.patches.verdict import VerdictKind, examine
    from dflash_deploy.serving_env.patches.view import SCHEMA_VERSION, tree_json, verdict_json, verdict_lines
    from dflash_deploy.tune.signals import stop_once

    patches = _patches(names)
    given = _parameters(settings)
    tree = _tree(env, to_change=not dry_run)
    mended = [] if dry_run else mend(tree)
    results: list[dict[str, object]] = []
    for line in () if json else mended:
        typer.echo(f"! {line}")
    for patch in patches:
        parameters = {name: value for name, value in given.items() if name in patch.parameters or names}
        decision, evidence = None, None
        kind = examine(patch, tree).verdict.kind if patch.decided_by is not None else None
        if kind is VerdictKind.APPLIED:
            evidence = _decision(tree, probe, measure=False)[1]
        if kind is VerdictKind.UNMEASURED:
            chosen = parameters.get("backend")
            decision, evidence = _decision_to_apply(
                tree, probe, chosen, unmeasured=unmeasured, asked=bool(names)
            )
            if decision is not None and decision.backend is not None:
                parameters.setdefault("backend", decision.backend)
        found = examine(patch, tree, decision)
        if found.verdict.kind is not VerdictKind.NEEDED and not names:
            results.append({**verdict_json(found.verdict), "changed": False, "diff": None})
            if not json:
                typer.echo("\n".join(verdict_lines(found.verdict)))
            continue
        diff, live, verdict = None, None, found.verdict
        if found.verdict.kind is VerdictKind.NEEDED:
            diff = prepare(patch, found, parameters).diff(patch.file)
        if not dry_run or found.verdict.kind is not VerdictKind.NEEDED:
            with stop_once():
                verdict = apply_patch(patch, tree, parameters, decision=decision, evidence=evidence)
            live = serving.check(patch, tree)
            # With SGLang's own choice it is SGLang that fails, and a variable then takes another.
            ours = parameters.get("backend") != DEFAULT
            if live.outcome == "failed" and found.verdict.kind is VerdictKind.NEEDED and ours:
                undone = revert(patch.name, tree)
                raise DeployError(
                    f"{patch.name} does not do here what it should: {live.message}\n{undone}",
                    fix="dflash-deploy patch list tells its limits",
                )
        changed = not dry_run and diff is not None
        results.append({**verdict_json(verdict, live), "changed": changed, "diff": diff})
        if not json:
            typer.echo(_shown(diff) if dry_run and diff else "\n".join(verdict_lines(verdict, live)))
    if json:
        _print_json(
            {
                "schema_version": SCHEMA_VERSION,
                "environment": tree_json(tree),
                "dry_run": dry_run,
                "mended": mended,
                "patches": results,
            }
        )


@app.command("revert")
def revert(
    names: _Names = None,
    *,
    env: _Environment = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Also where the file was edited since; that one is kept beside it, as FILE.edited.",
        ),
    ] = False,
    dry_run: _DryRun = False,
    json: _Json = False,
) -> None:
    """Put the original of a patched file back, byte for byte; without NAME, of every applied patch."""
    from dflash_deploy.serving_env.patches import ledger
    from dflash_deploy.serving_env.patches.operations import applied_diff, how_it_stands
    from dflash_deploy.serving_env.patches.operations import revert as revert_patch
    from dflash_deploy.serving_env.patches.view import SCHEMA_VERSION, tree_json
    from dflash_deploy.tune.signals import stop_once

    tree = _tree(env, to_change=not dry_run)
    if names:
        _patches(names)
    applied = {entry.change.patch: entry for entry in ledger.entries(tree)}
    wanted = list(names or applied)
    done = []
    for name in wanted:
        if dry_run:
            entry = applied.get(name)
            said = f"{name} would be reverted" if entry else f"{name} is not applied"
            if entry and entry.state == "applied":
                how_it_stands(tree, entry.change, force=force)
            diff = applied_diff(tree, entry) if entry and entry.state == "applied" else None
        else:
            with stop_once():
                said, diff = revert_patch(name, tree, force=force), None
        done.append({"name": name, "done": said, "diff": diff})
        if not json:
            typer.echo(said)
            if diff:
                typer.echo(f"this would go:\n{_shown(diff)}")
    if json:
        environment = tree_json(tree)
        _print_json(
            {
                "schema_version": SCHEMA_VERSION,
                "environment": environment,
                "dry_run": dry_run,
                "reverted": done,
            }
        )
    elif not wanted:
        typer.echo(f"No patch is applied in {tree.site_packages}.")


@app.command("diff")
def diff(names: _Names = None, *, env: _Environment = None, json: _Json = False) -> None:
    """Show what the applied patches changed, as a unified diff; without any, print nothing."""
    from dflash_deploy.serving_env.patches import ledger
    from dflash_deploy.serving_env.patches.operations import applied_diff
    from dflash_deploy.serving_env.patches.view import SCHEMA_VERSION, tree_json

    tree = _tree(env)
    if names:
        _patches(names)
    entries = [
        entry
        for entry in ledger.entries(tree)
        if entry.state == "applied" and (not names or entry.change.patch in names)
    ]
    diffs = {entry.change.patch: applied_diff(tree, entry) for entry in entries}
    if json:
        patches = [{"name": name, "diff": diff} for name, diff in diffs.items()]
        _print_json({"schema_version": SCHEMA_VERSION, "environment": tree_json(tree), "patches": patches})
        return
    typer.echo(_shown("".join(filter(None, diffs.values()))), nl=False)
    for name in (name for name, diff in diffs.items() if diff is None):
        typer.echo(f"{name} does not stand any more as it was applied; patch check tells more", err=True)


@app.command("verify")
def verify(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME…]", help="Patches that must be in place.", show_default=False),
    ] = None,
    *,
    env: _Environment = None,
    version: Annotated[
        str | None, typer.Option(metavar="VERSION", help="SGLang's version that must be installed.")
    ] = None,
    json: _Json = False,
) -> None:
    """Tell whether a server may start: the patches are what was applied, and nothing was installed over them.

    Quick, and changes nothing: for ExecStartPre= of a service. Exits with 0 when it may start, else with 1.
    """
    from dataclasses import asdict

    from dflash_deploy.serving_env.patches.integrity import verify_intact
    from dflash_deploy.serving_env.patches.view import SCHEMA_VERSION, verified_lines

    if names:
        _patches(names)
    tree = _tree(env)
    verdict = verify_intact(tree.site_packages, required=names or (), version=version)
    if json:
        _print_json({"schema_version": SCHEMA_VERSION, **asdict(verdict)})
    else:
        for line in verified_lines(verdict):
            typer.echo(line, err=not verdict.intact)
    if not verdict.intact:
        raise typer.Exit(ExitCode.FAILED)


@app.command("measure")
def measure(
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write the record there, for --probe."),
    ] = None,
    *,
    env: _Environment = None,
    json: Annotated[bool, typer.Option("--json", help="Print the record instead of the decision.")] = False,
) -> None:
    """Measure FlashInfer's back ends for per-tensor FP8 layers on this machine, and say which is to be taken.

    Exits with 0 when it was measured, with 4 when there is nothing here to measure on.
    """
    from dflash_deploy.files import write_atomic
    from dflash_deploy.machine.text import printable
    from dflash_deploy.serving_env.patches.bmm import decide
    from dflash_deploy.serving_env.patches.live import measure as run_probe

    report, content = run_probe(_tree(env))
    if out is not None:
        try:
            write_atomic(out, content)
        except OSError as error:
            raise DeployError(f"{out}: {error.strerror}", exit_code=ExitCode.UNAVAILABLE) from error
    decision = decide(report)
    if json:
        typer.echo(content.decode(), nl=False)
    else:
        for line in (*decision.evidence, decision.reason):
            typer.echo(printable(line, longest=2000))
        if decision.fix:
            typer.echo(f"  fix: {decision.fix}")
    if not decision.decided:
        raise typer.Exit(ExitCode.MISSING)


def _patches(names: Sequence[str] | None) -> list[Patch]:
    from dflash_deploy.serving_env.patches.description import load_patch, patch_names

    return [load_patch(name) for name in dict.fromkeys(names or patch_names())]


def _tree(env: str | None, *, to_change: bool = False) -> Tree:
    from dflash_deploy.serving_env.current import default_environment
    from dflash_deploy.serving_env.environments import find_environment, is_name, need_environment
    from dflash_deploy.serving_env.patches.tree import find_tree

    named = default_environment() if env is None else find_environment(env) if is_name(env) else None
    if named is None and env is not None and is_name(env) and not Path(env).exists():
        named = need_environment(env)
    if named is None:
        if env is None:
            raise DeployError(
                "no environment is named, and none is chosen",
                fix="give --env the environment that serves, or choose one: dflash-deploy env use NAME",
                exit_code=ExitCode.USAGE,
            )
        return find_tree(Path(env))
    if to_change and named.adopted:
        raise DeployError(
            f"environment {named.name} is adopted: nothing is written to {named.prefix} by that name",
            fix=f"name the folder itself: --env {shlex.quote(str(named.prefix))}",
            exit_code=ExitCode.USAGE,
        )
    return find_tree(named.prefix)


def _parameters(settings: Sequence[str] | None) -> dict[str, str]:
    parameters = {}
    for setting in settings or ():
        name, sign, value = setting.partition("=")
        if not sign:
            raise DeployError(f"--set {setting}: expected KEY=VALUE", exit_code=ExitCode.USAGE)
        parameters[name.strip()] = value.strip()
    return parameters


def _decision(tree: Tree, probe: Path | None, *, measure: bool) -> tuple[Decision | None, bytes | None]:
    from dflash_deploy.serving_env.patches.bmm import decide, read_report_file
    from dflash_deploy.serving_env.patches.live import measure as run_probe

    if probe is not None:
        report = read_report_file(probe)
        return decide(report), report.model_dump_json(indent=2).encode() + b"\n"
    if measure:
        report, content = run_probe(tree)
        return decide(report), content
    return None, None


def _decision_to_apply(
    tree: Tree, probe: Path | None, chosen: str | None, *, unmeasured: bool, asked: bool
) -> tuple[Decision | None, bytes | None]:
    """What decides an application; the record of a measurement is kept with it."""
    from dflash_deploy.serving_env.patches.bmm import DEFAULT, by_hand, to_measure

    if chosen == DEFAULT:
        return to_measure(), _decision(tree, probe, measure=False)[1]
    if unmeasured:
        if chosen is None:
            raise DeployError(
                "--unmeasured needs the back end to take",
                fix="--set backend=cudnn --unmeasured",
                exit_code=ExitCode.USAGE,
            )
        return by_hand(chosen), None
    # Without a name, everything that is plainly needed is applied; minutes on the GPU are asked for by name.
    return _decision(tree, probe, measure=asked)


def _shown(diff: str) -> str:
    """A diff as it is for a file or a pipe; for a terminal without what that would act on."""
    import sys

    from dflash_deploy.machine.text import printable

    if not sys.stdout.isatty():
        return diff
    return "".join(character if character in "\n\t" else printable(character) for character in diff)


def _print_json(value: object) -> None:
    from json import dumps

    typer.echo(dumps(value, indent=2, ensure_ascii=False))

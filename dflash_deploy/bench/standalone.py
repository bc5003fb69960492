"""A running server as a result file has it: measured from outside, nothing launched, nothing changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from dflash_deploy.bench.endpoint import Endpoint, no_address
from dflash_deploy.bench.load import Player
from dflash_deploy.bench.measurement import ErrorKind
from dflash_deploy.bench.play import ProtocolResult, player_of, run_protocol
from dflash_deploy.bench.protocols import Options, Protocol, prompts_of
from dflash_deploy.bench.quality.exam import Examination, examine, sheet
from dflash_deploy.bench.record import LONGEST_TEXT, file_of, quality_of, run_of, workload_of
from dflash_deploy.bench.results import Machine, ResultFile, Run
from dflash_deploy.engine.sglang.http import server_info
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.machine.gpu import GpuSample

Tell = Callable[[str], None]
Look = Callable[[], GpuSample | None]
Keep = Callable[[ResultFile], None]

_ASK_S = 10.0
KEEP_EVERY_S = 10.0
_MOST_PROMPTS = 64

_FIXES: Mapping[ErrorKind, str] = {
    "unreachable": "start the server, or give its address: dflash-deploy bench http://HOST:PORT",
    "untrusted": "write http:// if it speaks that; or name who signed its certificate: SSL_CERT_FILE=ca.pem",
    "denied": "give its key: --api-key-file FILE, or the variable DFLASH_API_KEY",
    "absent": "give what stands before /v1/chat/completions in its address, and a --model that it serves",
    "redirected": "give the address that it points to",
    "no-stream": "give the address of the model server itself, and not of a page or proxy before it",
}
"""Of a server that has answered nothing. Other failures are results."""


def bench(
    endpoint: Endpoint,
    protocol: Protocol,
    options: Options = Options(),  # noqa: B008  (frozen)
    *,
    machine: Machine | None = None,
    gpu: Look | None = None,
    exam: bool = False,
    read_text: bool = True,
    tell: Tell = lambda _: None,
    keep: Keep = lambda _: None,
) -> ResultFile:
    """Measure one server. Whatever it does wrong is in the result; nothing is raised for it.

    Ctrl-C ends the measuring: the result is then what had been measured, marked ``interrupted``.

    Args:
        endpoint: the server.
        protocol: how it is measured.
        options: what a person set.
        machine: where the server runs, if that is known.
        gpu: looks at its card, if that is here.
        exam: ask questions with known answers besides.
        read_text: judge the answers' texts.
        tell: told what is going on, in a few words.
        keep: now and then given what has been measured so far, for the case that this process is killed.

    Raises:
        DeployError: the endpoint's address is none, nobody answers there, or something else does.
    """
    kept_at = time.monotonic()

    def put_down(run: Run, *, interrupted: bool) -> ResultFile:
        workload = workload_of(protocol, options)
        return file_of([run], workload, machine, simulated=endpoint.simulated, interrupted=interrupted)

    def keep_level(played: ProtocolResult) -> None:
        nonlocal kept_at
        if time.monotonic() - kept_at >= KEEP_EVERY_S or len(played.levels) == 1:
            keep(put_down(run_of("bench", played, read_text=read_text), interrupted=True))
            kept_at = time.monotonic()

    played = _played(endpoint, protocol, options, gpu=gpu, tell=tell, on_level=keep_level)
    run = _described("bench", played, read_text=read_text)
    check_answered(run)
    interrupted = played.interrupted
    if exam and not run.failures and not interrupted:
        keep(put_down(run, interrupted=True))
        try:
            run, _ = examined_run(
                run, played.endpoint, users=max(protocol.users), read_text=read_text, tell=tell
            )
        except KeyboardInterrupt:
            interrupted = True
    return put_down(run, interrupted=interrupted)


def check_answered(run: Run) -> None:
    """See that a server was there at all.

    Raises:
        DeployError: nothing was answered, and for a reason that a person must mend.
    """
    kinds = {one.kind for one in run.failures}
    fix = next((fix for kind, fix in _FIXES.items() if kinds == {kind}), None)
    if fix is None or any(load.rounds for load in run.loads):
        return
    what = "nobody answers" if kinds == {"unreachable"} else "no chat is to be had"
    raise DeployError(
        f"{what} at {run.url}: {run.failures[0].example}", fix=fix, exit_code=ExitCode.UNAVAILABLE
    )


def measured_run(
    name: str,
    endpoint: Endpoint,
    protocol: Protocol,
    options: Options,
    *,
    gpu: Look | None = None,
    read_text: bool = True,
    tell: Tell = lambda _: None,
) -> Run:
    """Play a protocol and put it down.

    Raises:
        DeployError: the endpoint's address is none.
        KeyboardInterrupt: half of it is no run.
    """
    played = _played(endpoint, protocol, options, gpu=gpu, tell=tell)
    if played.interrupted:
        raise KeyboardInterrupt
    return _described(name, played, read_text=read_text)


def player_at(endpoint: Endpoint, protocol: Protocol, options: Options) -> Player:
    """Asks as the protocol does.

    Raises:
        DeployError: the endpoint's address is none.
    """
    try:
        return player_of(
            endpoint, protocol, _counting(endpoint, options), prompts_of(protocol, options, _MOST_PROMPTS)
        )
    except ValueError as error:
        raise no_address(error) from None


def examined_run(
    run: Run,
    endpoint: Endpoint,
    *,
    users: int,
    context_tokens: int | None = None,
    read_text: bool = True,
    tell: Tell = lambda _: None,
) -> tuple[Run, Examination]:
    """Examine a server that has been measured; what is wrong makes it unfit."""
    examination = examine(
        endpoint,
        sheet(context_tokens=context_tokens or endpoint.context_tokens),
        users=users,
        # A simulator's words mean nothing, and neither do those of random weights.
        knows=read_text and not endpoint.simulated,
        read_text=read_text,
        on_stage=tell,
    )
    update: dict[str, object] = {"quality": quality_of(examination)}
    if examination.unbegun:
        words = f"{examination.unbegun} answers of the examination ended within thoughts: it thinks unasked"
        update["notes"] = [*run.notes, words]
    if examination.faults and run.outcome == "served":
        update |= {"outcome": "unfit", "reason": "; ".join(examination.faults)[:LONGEST_TEXT]}
    return run.model_copy(update=update), examination


def _played(
    endpoint: Endpoint,
    protocol: Protocol,
    options: Options,
    *,
    gpu: Look | None,
    tell: Tell,
    on_level: Callable[[ProtocolResult], None] = lambda _: None,
) -> ProtocolResult:
    options = _counting(endpoint, options)
    try:
        played = run_protocol(endpoint, protocol, options, gpu=gpu, on_progress=tell, on_level=on_level)
    except ValueError as error:
        raise no_address(error) from None
    kinds = {kind for level in played.levels for kind in level.figures.errors}
    answered = any(level.figures.ttft_s is not None for level in played.levels)
    if kinds == {"refused"} and not answered and endpoint.extras and not played.interrupted:
        tell("asking once more, without what is not in OpenAI's interface")
        plainly = replace(endpoint, extras=False)
        again = _played(plainly, protocol, options, gpu=gpu, tell=tell, on_level=on_level)
        refused = {kind for level in again.levels for kind in level.figures.errors} == {"refused"}
        return played if refused else again
    return played


def _described(name: str, played: ProtocolResult, *, read_text: bool) -> Run:
    run = run_of(name, played, read_text=read_text)
    if run.vram_used_mib is None and played.endpoint.simulated and not played.interrupted:
        return run.model_copy(update={"vram_used_mib": _simulated_mib(played.endpoint)})
    return run


def _counting(endpoint: Endpoint, options: Options) -> Options:
    """A server of another kind may not count its tokens; that is then told with the figures."""
    return replace(options, estimate_tokens=options.estimate_tokens or endpoint.engine is None)


def _simulated_mib(endpoint: Endpoint) -> int | None:
    info = server_info(endpoint.base_url, timeout_s=_ASK_S, api_key=endpoint.api_key)
    used = info.simulator.vram_used_mib if info and info.simulator else None
    return None if used is None else round(used)

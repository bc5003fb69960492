"""A running server as a result file has it: measured from outside, nothing launched, nothing changed."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby

from dflash_deploy import __version__
from dflash_deploy.bench.chat import Sampling
from dflash_deploy.bench.endpoint import Endpoint
from dflash_deploy.bench.load import Load, Player
from dflash_deploy.bench.measure import patience
from dflash_deploy.bench.measurement import LoadFigures, RequestResult
from dflash_deploy.bench.prompts import mixed_prompts
from dflash_deploy.bench.protocols import (
    PROTOCOLS,
    Level,
    Options,
    Protocol,
    ProtocolResult,
    run_protocol,
)
from dflash_deploy.bench.quality.exam import Examination, examine, sheet
from dflash_deploy.bench.quality.faults import find_faults
from dflash_deploy.bench.results import (
    Failure,
    GpuRow,
    LoadRows,
    Machine,
    Outcome,
    ResultFile,
    RoundRow,
    Run,
    ServerRow,
    Workload,
    quality_of,
    round_row,
    tails_of,
    user_row,
    workload_hash,
)
from dflash_deploy.bench.server_side import ServerFigures
from dflash_deploy.bench.statistics import Comparison, compare_live
from dflash_deploy.bench.telemetry import Telemetry
from dflash_deploy.bench.workloads import TASKS, Prompt, Task
from dflash_deploy.engine.sglang.http import server_info
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.machine.gpu import GpuSample

Tell = Callable[[str], None]
Look = Callable[[], GpuSample | None]

_HASHED_PROMPTS = 64
"""Of a mix: more are asked in the same order, so that as many stand for them all."""

_MOST_USERS = 1024
_ASK_S = 10.0
_LONGEST_TEXT = 2000
_SLOWEST_TOKENS_PER_S = 0.5


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
) -> ResultFile:
    """Measure one server. Whatever it does wrong is in the result; nothing is raised for it.

    Args:
        endpoint: the server.
        protocol: how it is measured.
        options: what a person set.
        machine: where the server runs, if that is known.
        gpu: looks at its card, if that is here.
        exam: ask questions with known answers besides.
        read_text: judge the answers' texts.
        tell: told what is going on, in a few words.

    Raises:
        DeployError: the endpoint's address is none, or nobody answers there.
    """
    run = measured_run("bench", endpoint, protocol, options, gpu=gpu, read_text=read_text, tell=tell)
    if {one.kind for one in run.failures} == {"unreachable"} and not any(load.rounds for load in run.loads):
        raise DeployError(
            f"nobody answers at {endpoint.base_url}: {run.failures[0].example}",
            fix="start the server, or give its address: dflash-deploy bench http://HOST:PORT",
            exit_code=ExitCode.UNAVAILABLE,
        )
    if exam and not run.failures:
        run, _ = examined_run(run, endpoint, users=max(protocol.users), read_text=read_text, tell=tell)
    return _result([run], workload_of(protocol, options), machine, simulated=endpoint.simulated)


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
    """
    # A server of another kind may not count its tokens; that is then told with the figures.
    options = replace(options, estimate_tokens=options.estimate_tokens or endpoint.engine is None)
    try:
        played = run_protocol(endpoint, protocol, options, gpu=gpu, on_progress=tell)
    except ValueError as error:
        raise DeployError(
            str(error), fix="give an address like http://127.0.0.1:30000", exit_code=ExitCode.USAGE
        ) from None
    requests = [one for level in played.levels for one in level.requests]
    faults = faults_of(endpoint, requests, protocol.output_tokens, read_text=read_text)
    return _run(name, endpoint, _loads(played), failures_of(requests), faults).model_copy(
        update={
            "accept_length": _accept_length(played),
            "server": _server_row(played.server),
            "gpu": _gpu_row(played.gpu),
            "notes": [note[:_LONGEST_TEXT] for note in _notes(played)],
            "vram_used_mib": (played.gpu.vram_peak_mib if played.gpu else None) or _simulated_mib(endpoint),
        }
    )


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
    if examination.faults and run.outcome == "served":
        update |= {"outcome": "unfit", "reason": "; ".join(examination.faults)[:_LONGEST_TEXT]}
    return run.model_copy(update=update), examination


def workload_of(protocol: Protocol, options: Options) -> Workload:
    """What a protocol asks, as result files have it. Users and rounds are not in it: they are told apart."""
    prompts = options.prompts or mixed_prompts(dict(protocol.tasks), _HASHED_PROMPTS)
    arrivals = "closed" if options.rate_per_s is None else f"{options.rate_per_s:g}/s, seed {options.seed}"
    return Workload(
        protocol=protocol.name,
        tasks={} if options.prompts else {str(task): weight for task, weight in protocol.tasks},
        output_tokens=protocol.output_tokens,
        arrivals=arrivals,
        sha256=workload_hash(
            prompts,
            shape=protocol.shape,
            output_tokens=protocol.output_tokens,
            prompt_tokens=protocol.prompt_tokens,
            arrivals=arrivals,
            salted=options.salt is not None,
        ),
    )


@dataclass(frozen=True)
class Changes:
    """What a person wants otherwise than a protocol has it; None leaves it.

    Attributes:
        users: levels by comma.
        seconds: that each level of a ``closed`` protocol takes.
        tasks: a mix as ``read_tasks`` takes it.
        own_prompts: from a file, in place of the tasks.
        rate_per_s: of an open loop.
    """

    users: str | None = None
    output_tokens: int | None = None
    rounds: int | None = None
    cold: int | None = None
    seconds: float | None = None
    tasks: str | None = None
    own_prompts: bool = False
    rate_per_s: float | None = None


def changed(name: str, changes: Changes) -> Protocol:
    """A protocol by its name, with changes.

    Its name says so where it asks something else: then its figures are not those of the protocol.

    Raises:
        DeployError: there is no such protocol, or it has nothing that could be changed so.
    """
    protocol = PROTOCOLS.get(name)
    if protocol is None:
        raise DeployError(
            f"there is no protocol {name!r}",
            fix=f"protocols are {', '.join(PROTOCOLS)}",
            exit_code=ExitCode.USAGE,
        )
    if protocol.shape != "closed" and (changes.seconds or changes.rate_per_s):
        closed = ", ".join(one.name for one in PROTOCOLS.values() if one.shape == "closed")
        raise DeployError(
            f"{name} goes in rounds: it takes neither a rate nor seconds",
            fix=f"add --protocol with one of {closed}",
            exit_code=ExitCode.USAGE,
        )
    wanted = replace(
        protocol,
        users=read_levels(changes.users) if changes.users else protocol.users,
        output_tokens=changes.output_tokens or protocol.output_tokens,
        warm_up=protocol.warm_up if changes.cold is None else changes.cold,
        duration_s=changes.seconds or (None if changes.rounds else protocol.duration_s),
        tasks=tuple(read_tasks(changes.tasks).items()) if changes.tasks else protocol.tasks,
    )
    other = wanted != protocol or changes.own_prompts or changes.rate_per_s is not None
    return replace(
        wanted,
        name=f"{name} (changed)" if other else name,
        rounds=changes.rounds or protocol.rounds,
    )


def read_tasks(text: str) -> dict[Task, float]:
    """A mix as a person writes it: ``code`` or ``instruction=2,code=1``.

    Raises:
        DeployError: an unknown task, or a weight that is none.
    """
    mix: dict[Task, float] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, _, weight = word.partition("=")
        task = next((one for one in TASKS if one == name), None)
        try:
            share = float(weight or 1)
        except ValueError:
            share = math.nan
        if task is None or not 0 <= share < math.inf:
            raise DeployError(
                f"{word!r} is no task with its weight",
                fix=f"tasks are {', '.join(TASKS)}; write code, or instruction=2,code=1",
                exit_code=ExitCode.USAGE,
            )
        mix[task] = share
    if not sum(mix.values()):
        raise DeployError("no task is asked for", exit_code=ExitCode.USAGE)
    return mix


def read_levels(text: str) -> tuple[int, ...]:
    """Load levels by comma.

    Raises:
        DeployError: one is no number of users.
    """
    words = [part.strip() for part in text.split(",")]
    if not all(word.isdecimal() and 1 <= int(word) <= _MOST_USERS for word in words):
        raise DeployError(
            f"{text!r} are no numbers of users", fix="write 4, or 1,2,4", exit_code=ExitCode.USAGE
        )
    return tuple(dict.fromkeys(int(word) for word in words))


def faults_of(
    endpoint: Endpoint, requests: Sequence[RequestResult], output_tokens: int, *, read_text: bool
) -> tuple[str, ...]:
    """What is wrong with answers whose length was to be forced."""
    answered = [one for one in requests if one.error is None]
    # To force a length is no part of OpenAI's interface: others than SGLang may end before.
    exact = output_tokens if endpoint.engine is not None else None
    return find_faults(answered, exact, read_text=read_text, free_end=False)


def failures_of(requests: Sequence[RequestResult]) -> tuple[Failure, ...]:
    """The requests that failed, by kind."""
    found: dict[str, list[str]] = {}
    for one in requests:
        if one.error is not None:
            found.setdefault(one.error_kind or "broken", []).append(one.error)
    return tuple(
        Failure(kind=kind, count=len(errors), example=errors[0][:_LONGEST_TEXT])
        for kind, errors in found.items()
    )


def bench_both(
    a: Endpoint,
    b: Endpoint,
    protocol: Protocol,
    options: Options = Options(),  # noqa: B008  (frozen)
    *,
    most_rounds: int,
    machine: Machine | None = None,
    read_text: bool = True,
    tell: Tell = lambda _: None,
) -> tuple[ResultFile, Comparison | None]:
    """Measure two live servers in turn until it is clear which is faster.

    Args:
        a: that is said to be faster or slower.
        b: than this.
        protocol: the first of its levels is played, in rounds; its rounds are the least number of them.
        options: what a person set.
        most_rounds: of each server.
        machine: where both run, if that is known.
        read_text: judge the answers' texts.
        tell: told what is going on, in a few words.

    Returns:
        Both runs, and the comparison; None where one of the two failed.

    Raises:
        DeployError: an address is none, or one server is simulated and the other is not.
    """
    if a.simulated != b.simulated:
        raise DeployError(
            "one server is simulated and the other is not: the two do not compare", exit_code=ExitCode.USAGE
        )
    if options.salt == "":
        # Round n asks both the same, salt and all, and neither has met it before.
        options = replace(options, salt=secrets.token_hex(4))
    arms = [
        _Arm(name, endpoint, protocol, options, read_text=read_text, tell=tell)
        for name, endpoint in (("A", a), ("B", b))
    ]
    found: Comparison | None = None
    try:
        for arm in arms:
            arm.warm_up()
        found = compare_live(
            arms[0].play, arms[1].play, min_rounds=min(protocol.rounds, most_rounds), max_rounds=most_rounds
        )
    except _BrokenError:
        pass
    workload = workload_of(replace(protocol, shape="rounds"), options)
    return _result([arm.run() for arm in arms], workload, machine, simulated=a.simulated), found


class _BrokenError(Exception):
    """A round did not go well; its arm has the failures."""


class _Arm:
    """One of two live servers, and its rounds until now."""

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        protocol: Protocol,
        options: Options,
        *,
        read_text: bool,
        tell: Tell,
    ) -> None:
        self._name = name
        self._endpoint = endpoint
        self._protocol = protocol
        self._users = protocol.users[0]
        self._read_text = read_text
        self._tell = tell
        self._player = _player(endpoint, protocol, options)
        self._rows: list[RoundRow] = []
        self._results: list[RequestResult] = []
        self._failures: tuple[Failure, ...] = ()

    def warm_up(self) -> None:
        for number in range(self._protocol.warm_up):
            self._round("w", number, f"warm-up {number + 1}" if number else "cold", counts=False)

    def play(self) -> float:
        """One round that counts: its speed."""
        number = sum(row.counts for row in self._rows)
        row = self._round("r", number, f"round {number + 1}", counts=True)
        return row.tokens_per_s if self._users > 1 else row.user_tokens_per_s or row.tokens_per_s

    def run(self) -> Run:
        """What it has come to."""
        faults = faults_of(
            self._endpoint, self._results, self._protocol.output_tokens, read_text=self._read_text
        )
        figures = LoadFigures.of(self._results) if self._results else None
        rows = LoadRows(users=self._users, rounds=self._rows, tails=tails_of(figures))
        run = _run(self._name, self._endpoint, [rows], self._failures, faults)
        return run.model_copy(update={"accept_length": figures.accept_length if figures else None})

    def _round(self, salt: str, number: int, name: str, *, counts: bool) -> RoundRow:
        self._tell(f"{self._name}: {name}")
        played = asyncio.run(self._player.round(self._users, salt, number))
        self._failures = failures_of(played.requests)
        if self._failures:
            raise _BrokenError
        row = round_row(name, played, counts=counts)
        self._rows.append(row)
        if counts:
            self._results.extend(played.requests)
        return row


def _player(endpoint: Endpoint, protocol: Protocol, options: Options) -> Player:
    prompts: Sequence[Prompt] = options.prompts or mixed_prompts(dict(protocol.tasks), _HASHED_PROMPTS)
    total_s = 60.0 + protocol.output_tokens / _SLOWEST_TOKENS_PER_S
    load = Load(
        endpoint,
        prompts,
        Sampling(protocol.output_tokens),
        patience(options.stall_s, total_s, endpoint.time_scale),
        options.salt,
        options.estimate_tokens or endpoint.engine is None,
    )
    try:
        return Player(load)
    except ValueError as error:
        raise DeployError(
            str(error), fix="give an address like http://127.0.0.1:30000", exit_code=ExitCode.USAGE
        ) from None


def _loads(played: ProtocolResult) -> list[LoadRows]:
    """Rounds of one number of users belong together; every other level stands for itself."""
    found: list[LoadRows] = []
    for users, levels in groupby(played.levels, key=lambda level: level.users):
        rows = [level for level in levels if level.figures.ttft_s is not None]
        if not rows:
            continue
        if played.protocol.shape == "rounds":
            counted = [one for level in rows if not level.cold for one in level.requests]
            tails = tails_of(LoadFigures.of(counted)) if counted else {}
            found.append(LoadRows(users=users, rounds=[_row(level) for level in rows], tails=tails))
            continue
        found += [
            LoadRows(
                users=users,
                label=level.label,
                rounds=[_row(level)],
                tails=tails_of(level.figures),
                prompt_tokens=level.prompt_tokens,
                prefill_tokens_per_s=level.prefill_tokens_per_s,
            )
            for level in rows
        ]
    return found


def _row(level: Level) -> RoundRow:
    figures = level.figures
    return RoundRow(
        name=level.label,
        counts=not level.cold,
        tokens_per_s=figures.total_tokens_per_s,
        user_tokens_per_s=figures.user_tokens_per_s.median if figures.user_tokens_per_s else None,
        ttft_s=figures.ttft_s.median if figures.ttft_s else 0.0,
        wall_s=figures.wall_s,
        users=[user_row(one) for one in level.requests if one.error is None],
    )


def _accept_length(played: ProtocolResult) -> float | None:
    """Of the answers themselves, of warm levels if there are any; else as the server says."""
    warm = [level for level in played.levels if not level.cold and level.requests]
    requests = [one for level in warm for one in level.requests]
    own = LoadFigures.of(requests).accept_length if requests else None
    return own or (played.server.accept_length if played.server else None)


def _notes(played: ProtocolResult) -> Iterator[str]:
    yield from played.notes
    if played.stopped is not None:
        yield f"it ended early: {played.stopped}"
    if played.endpoint.time_scale != 1 and played.protocol.shape != "rounds":
        yield (
            f"simulated time runs {played.endpoint.time_scale:g} times as fast, and so does every delay of "
            "ours: outside of rounds, speeds read low"
        )


def _server_row(figures: ServerFigures | None) -> ServerRow | None:
    if figures is None:
        return None
    return ServerRow(
        queue_s=figures.queue_s,
        generated_tokens=figures.generated_tokens,
        cached_tokens=figures.cached_tokens,
        retracted=figures.retracted,
        aborted=figures.aborted,
    )


def _gpu_row(seen: Telemetry | None) -> GpuRow | None:
    if seen is None:
        return None
    return GpuRow(
        clock_sm_mhz=seen.clock_sm_mhz.median if seen.clock_sm_mhz else None,
        power_w=seen.power_w.median if seen.power_w else None,
        temperature_c=seen.temperature_c.high if seen.temperature_c else None,
        throttled=seen.throttled,
        clock_reasons=seen.clock_reasons,
    )


def _run(
    name: str,
    endpoint: Endpoint,
    loads: list[LoadRows],
    failures: Sequence[Failure],
    faults: Sequence[str],
) -> Run:
    outcome: Outcome = "unstable" if failures else "unfit" if faults else "served"
    reason = failures[0].example if failures else "; ".join(faults)[:_LONGEST_TEXT] or None
    return Run(
        name=name,
        outcome=outcome,
        reason=reason,
        url=endpoint.base_url,
        model=endpoint.model,
        engine=endpoint.engine,
        engine_version=endpoint.version,
        loads=loads,
        failures=list(failures),
    )


def _result(runs: list[Run], workload: Workload, machine: Machine | None, *, simulated: bool) -> ResultFile:
    return ResultFile(
        tool_version=__version__,
        created=datetime.now(UTC),
        kind="simulated" if simulated else "measured",
        machine=machine,
        workload=workload,
        runs=runs,
    )


def _simulated_mib(endpoint: Endpoint) -> int | None:
    if not endpoint.simulated:
        return None
    info = server_info(endpoint.base_url, timeout_s=_ASK_S, api_key=endpoint.api_key)
    used = info.simulator.vram_used_mib if info and info.simulator else None
    return None if used is None else round(used)

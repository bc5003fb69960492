"""What was measured, put down as result files have it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from dflash_deploy import __version__
from dflash_deploy.bench.endpoint import Endpoint
from dflash_deploy.bench.measurement import LoadFigures, Quantiles, RequestResult
from dflash_deploy.bench.play import Level, ProtocolResult
from dflash_deploy.bench.protocols import Options, Protocol, prompts_of
from dflash_deploy.bench.quality.agreement import Agreement
from dflash_deploy.bench.quality.exam import Examination, Kind, Mode, Score
from dflash_deploy.bench.quality.faults import find_faults
from dflash_deploy.bench.results import (
    AgreementRow,
    Failure,
    GpuRow,
    LoadRows,
    Machine,
    Outcome,
    Quality,
    ResultFile,
    RoundRow,
    Run,
    ServerRow,
    Tail,
    Tailed,
    UserRow,
    Workload,
    digest,
    workload_hash,
)
from dflash_deploy.bench.server_side import ServerFigures
from dflash_deploy.bench.telemetry import Telemetry

PLAINLY = (
    "the server refuses what is not in OpenAI's interface: answers may end early, and thinking is as its "
    "template has it"
)
ENDED_EARLY = "it ended early: "
LONGEST_TEXT = 2000
_HASHED_PROMPTS = 64
"""Of a mix: more are asked in the same order, so that as many stand for them all."""

_LATE_S = 0.05
_MUCH_MORE = 1.2
"""Answers end in the midst of a step."""
_MOST_ROWS = 20_000
"""Requests that are told one by one; a file of more than that would be too large to read."""


def run_of(name: str, played: ProtocolResult, *, read_text: bool) -> Run:
    """A protocol as it went; the card's memory in use is not in it where nobody looked at the card."""
    endpoint = played.endpoint
    requests = [one for level in played.levels for one in level.requests]
    faults = faults_of(endpoint, requests, played.protocol.output_tokens, read_text=read_text)
    return run_with(name, endpoint, _loads(played), failures_of(requests), faults).model_copy(
        update={
            "accept_length": _accept_length(played),
            "server": _server_row(played.server),
            "gpu": _gpu_row(played.gpu),
            "notes": [note[:LONGEST_TEXT] for note in _notes(played)],
            "vram_used_mib": played.gpu.vram_peak_mib if played.gpu else None,
        }
    )


def workload_of(protocol: Protocol, options: Options) -> Workload:
    """What a protocol asks, as result files have it. Users and rounds are not in it: they are told apart."""
    prompts = prompts_of(protocol, options, _HASHED_PROMPTS)
    arrivals, moments = "closed", {}
    if options.arrivals_s is not None:
        arrivals = f"{len(options.arrivals_s)} given in {options.arrivals_s[-1]:g} s"
        moments = {"arrivals_s": options.arrivals_s}
    elif options.rate_per_s is not None:
        arrivals = f"{options.rate_per_s:g}/s, seed {options.seed}"
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
            **moments,
        ),
    )


def faults_of(
    endpoint: Endpoint, requests: Sequence[RequestResult], output_tokens: int, *, read_text: bool
) -> tuple[str, ...]:
    """What is wrong with answers whose length was to be forced."""
    answered = [one for one in requests if one.error is None]
    # To force a length is no part of OpenAI's interface: others than SGLang may end before.
    exact = output_tokens if endpoint.engine is not None else None
    return find_faults(answered, exact, most_tokens=output_tokens, read_text=read_text, free_end=False)


def failures_of(requests: Sequence[RequestResult]) -> tuple[Failure, ...]:
    """The requests that failed, by kind."""
    found: dict[str, list[str]] = {}
    for one in requests:
        if one.error is not None:
            found.setdefault(one.error_kind or "broken", []).append(one.error)
    return tuple(
        Failure(kind=kind, count=len(errors), example=errors[0][:LONGEST_TEXT])
        for kind, errors in found.items()
    )


def _loads(played: ProtocolResult) -> list[LoadRows]:
    """Rounds of one number of users belong together, and so do the times that one level was played."""
    in_rounds, listed = played.protocol.shape == "rounds", not _too_many(played)
    loads: dict[tuple[int, str | None], list[Level]] = {}
    for level in played.levels:
        if level.figures.ttft_s is not None:
            loads.setdefault((level.users, None if in_rounds else level.label), []).append(level)
    return [_load_rows(label, levels, listed=listed) for (_, label), levels in loads.items()]


def _load_rows(label: str | None, levels: Sequence[Level], *, listed: bool) -> LoadRows:
    names = [
        level.label if label is None or number == 1 else f"{label}, round {number}"
        for number, level in enumerate(levels, 1)
    ]
    counted = [level for level in levels if not level.cold]
    figures = (
        counted[0].figures
        if len(counted) == 1
        else LoadFigures.of([one for level in counted for one in level.requests])
        if counted
        else None
    )
    first = levels[0]
    return LoadRows(
        users=first.users,
        label=label,
        window=first.window,
        rounds=[
            round_row(name, level.requests if listed else (), level.figures, counts=not level.cold)
            for name, level in zip(names, levels, strict=True)
        ],
        tails=tails_of(figures),
        prompt_tokens=first.prompt_tokens,
        prefill_tokens_per_s=first.prefill_tokens_per_s,
    )


def _too_many(played: ProtocolResult) -> bool:
    return sum(len(level.requests) for level in played.levels) > _MOST_ROWS


def _accept_length(played: ProtocolResult) -> float | None:
    """Of the answers themselves, of warm levels if there are any; else as the server says."""
    warm = [level for level in played.levels if not level.cold and level.requests]
    requests = [one for level in warm for one in level.requests]
    own = LoadFigures.of(requests).accept_length if requests else None
    return own or (played.server.accept_length if played.server else None)


def _notes(played: ProtocolResult) -> Iterator[str]:
    yield from played.notes
    if not played.endpoint.extras:
        yield PLAINLY
    if _too_many(played):
        yield f"more than {_MOST_ROWS:,} requests: they are not listed one by one"
    if played.stopped is not None:
        yield f"{ENDED_EARLY}{played.stopped}"
    if others := _tokens_of_others(played):
        yield f"the server made {others:,} tokens more than were asked for here: others use it too"
    waits = [level.figures.waited_s.p99 for level in played.levels if level.figures.waited_s]
    if played.endpoint.time_scale == 1 and max(waits, default=0.0) > _LATE_S:
        yield (
            f"requests were sent {max(waits) * 1000:.0f} ms after they were due (p99): this machine does not "
            "keep up with them, so the server had less to do than was asked for"
        )
    if played.endpoint.time_scale != 1 and played.protocol.shape != "rounds":
        yield (
            f"simulated time runs {played.endpoint.time_scale:g} times as fast, and so does every delay of "
            "ours: outside of rounds, speeds read low"
        )


def _tokens_of_others(played: ProtocolResult) -> int:
    """That the server made meanwhile, beyond what may be our own counting; 0 where that cannot be told."""
    made = played.server.generated_tokens if played.server else None
    loads = [level.figures for level in played.levels if not level.window]
    if made is None or any(load.errors or load.tokens_estimated for load in loads):
        return 0
    ours = played.warm_up_tokens + sum(load.output_tokens for load in loads)
    return made - ours if made > _MUCH_MORE * ours else 0


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


def run_with(
    name: str,
    endpoint: Endpoint,
    loads: list[LoadRows],
    failures: Sequence[Failure],
    faults: Sequence[str],
) -> Run:
    """A run, and what it came to."""
    outcome: Outcome = "unstable" if failures else "unfit" if faults else "served"
    reason = failures[0].example if failures else "; ".join(faults)[:LONGEST_TEXT] or None
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


def round_row(
    name: str, requests: Sequence[RequestResult], figures: LoadFigures, *, counts: bool
) -> RoundRow:
    """A round or load as result files keep it, with a row for each request that was answered."""
    return RoundRow(
        name=name,
        counts=counts,
        tokens_per_s=figures.total_tokens_per_s,
        user_tokens_per_s=figures.user_tokens_per_s.median if figures.user_tokens_per_s else None,
        ttft_s=figures.ttft_s.median if figures.ttft_s else 0.0,
        wall_s=figures.wall_s,
        users=[user_row(one) for one in requests if one.error is None],
    )


def tails_of(figures: LoadFigures | None) -> dict[Tailed, Tail]:
    """How long the slowest requests took; what cannot be told is left out."""
    if figures is None:
        return {}
    found: dict[Tailed, Quantiles | None] = {
        "ttft_s": figures.ttft_s,
        "inter_token_s": figures.inter_token_s,
        "latency_s": figures.latency_s,
        "waited_s": figures.waited_s,
    }
    return {
        name: Tail(median=one.median, p95=one.p95, p99=one.p99)
        for name, one in found.items()
        if one is not None
    }


def quality_of(examination: Examination, agreement: Mapping[Mode, Agreement] | None = None) -> Quality:
    """An examination as result files keep it: digests in place of texts."""
    scores: Mapping[Kind, Score] = examination.scores
    return Quality(
        asked={kind: score.asked for kind, score in scores.items()},
        right={kind: score.right for kind, score in scores.items()},
        missed={name: why[:4096] for name, why in examination.missed.items()},
        faults=[fault[:4096] for fault in examination.faults],
        repeated=examination.repeated,
        repeated_same=examination.repeated_same,
        cached_tokens=examination.cached_tokens,
        digests={
            mode: {name: said.digest for name, said in answers.items()}
            for mode, answers in examination.answers.items()
        },
        agreement=None
        if agreement is None
        else {
            mode: AgreementRow(
                prompts=one.prompts,
                identical=one.identical,
                diverge_after=one.diverge_after,
                counted=one.counted,
            )
            for mode, one in agreement.items()
        },
    )


def user_row(one: RequestResult) -> UserRow:
    """A request as result files keep it."""
    return UserRow(
        user=one.user,
        prompt_tokens=one.prompt_tokens,
        output_tokens=one.output_tokens,
        ttft_s=one.ttft_s,
        tokens_per_s=one.decode_tokens_per_s,
        wall_s=one.total_s,
        accept_length=one.accept_length,
        digest=digest(one.text),
        estimated=one.tokens_estimated,
    )


def file_of(
    runs: list[Run],
    workload: Workload,
    machine: Machine | None,
    *,
    simulated: bool,
    interrupted: bool = False,
) -> ResultFile:
    """What was measured here and now."""
    return ResultFile(
        tool_version=__version__,
        created=datetime.now(UTC),
        kind="simulated" if simulated else "measured",
        interrupted=interrupted,
        machine=machine,
        workload=workload,
        runs=runs,
    )

"""Servers that somebody else has started, measured from outside: nothing is launched, nothing is changed."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from dflash_deploy import __version__
from dflash_deploy.bench.endpoint import Endpoint
from dflash_deploy.bench.load import Player, poisson
from dflash_deploy.bench.measurement import LoadFigures, RequestResult, Round
from dflash_deploy.bench.playing import Played, Rounds, failures_of, faults_of, peak_of, play, player_of
from dflash_deploy.bench.quality.exam import Examination, examine, sheet
from dflash_deploy.bench.results import (
    Failure,
    LoadRows,
    Machine,
    Outcome,
    ResultFile,
    RoundRow,
    Run,
    Workload,
    quality_of,
    round_row,
    tails_of,
    workload_hash,
)
from dflash_deploy.bench.statistics import Comparison, compare_live
from dflash_deploy.bench.workloads import TASKS, Prompt, Task
from dflash_deploy.engine.sglang.http import server_info
from dflash_deploy.errors import DeployError, ExitCode

Tell = Callable[[str], None]
Gauge = Callable[[], int | None]

PROMPTS = 64
"""Of a mix; later rounds begin with them anew. The same number everywhere, so that results compare."""

_ASK_S = 10.0
_MOST_USERS = 1024
_LONGEST_REASON = 2000


@dataclass(frozen=True)
class Arrivals:
    """An open loop: requests at random moments, however many are still being answered."""

    rate_per_s: float
    requests: int
    seed: int = 0


@dataclass(frozen=True)
class Asked:
    """What a server is asked.

    Attributes:
        protocol: name of this way of asking.
        prompts: in turn.
        tasks: weights of the mix that they are from; empty for a person's own file.
        output_tokens: of each answer, exactly with ``forced_length``, else at most.
        users: load levels, one after the other; not used in an open loop.
        rounds: of each level that count. ``cold``: before them.
        arrivals: an open loop in place of rounds.
        salted: every prompt begins in its own way, so that no cache can help.
    """

    protocol: str
    prompts: Sequence[Prompt]
    tasks: Mapping[str, float]
    output_tokens: int
    forced_length: bool = True
    users: tuple[int, ...] = (1,)
    rounds: int = 3
    cold: int = 1
    arrivals: Arrivals | None = None
    salted: bool = True

    def level(self, users: int) -> Rounds:
        """The rounds of one load level."""
        return Rounds(users, self.output_tokens, self.rounds, self.cold, self.forced_length)

    @property
    def workload(self) -> Workload:
        """As result files have it."""
        return Workload(
            protocol=self.protocol,
            tasks=dict(self.tasks),
            output_tokens=self.output_tokens,
            forced_length=self.forced_length,
            arrivals=(
                "closed"
                if self.arrivals is None
                else f"{self.arrivals.requests} at {self.arrivals.rate_per_s:g}/s, seed {self.arrivals.seed}"
            ),
            sha256=workload_hash(
                self.prompts,
                output_tokens=self.output_tokens,
                forced_length=self.forced_length,
                salted=self.salted,
            ),
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


def bench(
    endpoint: Endpoint,
    asked: Asked,
    *,
    machine: Machine | None = None,
    vram_used_mib: Gauge | None = None,
    exam: bool = False,
    read_text: bool = True,
    tell: Tell = lambda _: None,
) -> ResultFile:
    """Measure one server. Whatever it does wrong is in the result; nothing is raised for it.

    Args:
        endpoint: the server.
        asked: the load.
        machine: where the server runs, if that is known.
        vram_used_mib: reads the use of its card, if that is here.
        exam: ask questions with known answers besides.
        read_text: judge the answers' texts.
        tell: told what is going on, in a few words.

    Raises:
        DeployError: the endpoint's address is none, or nobody answers there.
    """
    loads: list[LoadRows] = []
    faults: list[str] = []
    played: Played | None = None
    if asked.arrivals is not None:
        played = _open(endpoint, asked, asked.arrivals, gauge=vram_used_mib, read_text=read_text, tell=tell)
        loads, faults = [played.rows], list(played.faults)
    for users in asked.users if asked.arrivals is None else ():
        played = play(
            endpoint,
            asked.prompts,
            asked.level(users),
            salt=_salt(asked),
            vram_used_mib=vram_used_mib,
            read_text=read_text,
            on_round=lambda text, users=users: tell(f"{users} at once: {text}"),  # type: ignore[misc]
        )
        loads.append(played.rows)
        faults += [fault for fault in played.faults if fault not in faults]
        if played.failures:
            break
    if played and not played.rows.rounds and {one.kind for one in played.failures} == {"unreachable"}:
        raise DeployError(
            f"nobody answers at {endpoint.base_url}: {played.failures[0].example}",
            fix="start the server, or give its address: dflash-deploy bench http://HOST:PORT",
            exit_code=ExitCode.UNAVAILABLE,
        )
    examination: Examination | None = None
    if exam and not (played and played.failures):
        examination = _examined(endpoint, max(asked.users), read_text, tell)
        faults += examination.faults
    run = _run("bench", endpoint, loads, played.failures if played else (), faults)
    run = run.model_copy(
        update={
            "accept_length": (played.accept_length if played else None) or _accept_length(endpoint),
            "quality": quality_of(examination) if examination else None,
            "vram_used_mib": (played.vram_used_mib if played else None) or _simulated_mib(endpoint),
        }
    )
    return _result([run], asked, machine, simulated=endpoint.simulated)


def bench_both(
    a: Endpoint,
    b: Endpoint,
    asked: Asked,
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
        asked: the load; of its levels the first. Its rounds are the least number.
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
    level = asked.level(asked.users[0])
    salt = _salt(asked)
    arms = [
        # Round n asks both the same, salt and all, and neither has met it before.
        _Arm(
            name,
            endpoint,
            player_of(endpoint, asked.prompts, level, salt=salt),
            level,
            read_text=read_text,
            tell=tell,
        )
        for name, endpoint in (("A", a), ("B", b))
    ]
    found: Comparison | None = None
    try:
        for arm in arms:
            arm.warm_up()
        found = compare_live(
            arms[0].play, arms[1].play, min_rounds=min(asked.rounds, most_rounds), max_rounds=most_rounds
        )
    except _BrokenError:
        pass
    result = _result([arm.run() for arm in arms], asked, machine, simulated=a.simulated)
    return result, found


class _BrokenError(Exception):
    """A round did not go well; its arm has the failures."""


class _Arm:
    """One of two live servers, and its rounds until now."""

    def __init__(
        self, name: str, endpoint: Endpoint, player: Player, level: Rounds, *, read_text: bool, tell: Tell
    ) -> None:
        self._name = name
        self._endpoint = endpoint
        self._level = level
        self._read_text = read_text
        self._tell = tell
        self._player = player
        self._rows: list[RoundRow] = []
        self._results: list[RequestResult] = []
        self._failures: tuple[Failure, ...] = ()

    def warm_up(self) -> None:
        for number in range(self._level.cold):
            self._round("w", number, "cold" if self._level.cold == 1 else f"cold {number + 1}", counts=False)

    def play(self) -> float:
        """One round that counts: its speed."""
        number = sum(row.counts for row in self._rows)
        row = self._round("r", number, str(number + 1), counts=True)
        return row.tokens_per_s if self._level.users > 1 else row.user_tokens_per_s or row.tokens_per_s

    def run(self) -> Run:
        """What it has come to."""
        faults = faults_of(self._endpoint, self._results, self._level, read_text=self._read_text)
        rows = LoadRows(users=self._level.users, rounds=self._rows, tails=tails_of(self._results))
        run = _run(self._name, self._endpoint, [rows], self._failures, faults)
        length = LoadFigures.of(self._results).accept_length if self._results else None
        return run.model_copy(update={"accept_length": length or _accept_length(self._endpoint)})

    def _round(self, salt: str, number: int, name: str, *, counts: bool) -> RoundRow:
        self._tell(f"{self._name}: round {name}")
        played = asyncio.run(self._player.round(self._level.users, salt, number))
        self._failures = failures_of(played.requests)
        if self._failures:
            raise _BrokenError
        row = round_row(name, played, counts=counts)
        self._rows.append(row)
        if counts:
            self._results.extend(played.requests)
        return row


def _open(
    endpoint: Endpoint, asked: Asked, arrivals: Arrivals, *, gauge: Gauge | None, read_text: bool, tell: Tell
) -> Played:
    level = Rounds(1, asked.output_tokens, 1, 0, asked.forced_length)
    player = player_of(endpoint, asked.prompts, level, salt=_salt(asked))
    answered: list[RequestResult] = []

    def count(one: RequestResult) -> None:
        answered.append(one)
        if len(answered) % max(1, arrivals.requests // 20) == 0:
            tell(f"{len(answered)} of {arrivals.requests} answered")

    moments = poisson(arrivals.rate_per_s * endpoint.time_scale, arrivals.requests, seed=arrivals.seed)
    with peak_of(gauge) as peak:
        results = asyncio.run(player.open(moments, on_answer=count))
    good = [one for one in results if one.error is None]
    rows = [round_row("open", Round(tuple(good)))] if good else []
    return Played(
        LoadRows(users=0, rounds=rows, tails=tails_of(good)),
        failures_of(results),
        faults_of(endpoint, good, level, read_text=read_text),
        LoadFigures.of(good).accept_length if good else None,
        peak(),
    )


def _examined(endpoint: Endpoint, users: int, read_text: bool, tell: Tell) -> Examination:
    return examine(
        endpoint,
        sheet(context_tokens=endpoint.context_tokens),
        users=users,
        knows=read_text and not endpoint.simulated,
        read_text=read_text,
        on_stage=tell,
    )


def _salt(asked: Asked) -> str | None:
    # Of its own each time: the server may have answered these very questions yesterday.
    return secrets.token_hex(4) if asked.salted else None


def _run(
    name: str,
    endpoint: Endpoint,
    loads: list[LoadRows],
    failures: Sequence[Failure],
    faults: Sequence[str],
) -> Run:
    outcome: Outcome = "unstable" if failures else "unfit" if faults else "served"
    reason = failures[0].example if failures else "; ".join(faults)[:_LONGEST_REASON] or None
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


def _result(runs: list[Run], asked: Asked, machine: Machine | None, *, simulated: bool) -> ResultFile:
    return ResultFile(
        tool_version=__version__,
        created=datetime.now(UTC),
        kind="simulated" if simulated else "measured",
        machine=machine,
        workload=asked.workload,
        runs=runs,
    )


def _accept_length(endpoint: Endpoint) -> float | None:
    info = server_info(endpoint.base_url, timeout_s=_ASK_S, api_key=endpoint.api_key)
    return info.accept_length if info else None


def _simulated_mib(endpoint: Endpoint) -> int | None:
    info = server_info(endpoint.base_url, timeout_s=_ASK_S, api_key=endpoint.api_key)
    used = info.simulator.vram_used_mib if info and info.simulator else None
    return None if used is None else round(used)

"""Two live servers measured in turn, until it is clear which is faster."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from dflash_deploy.bench.endpoint import Endpoint
from dflash_deploy.bench.load import Turn, turns
from dflash_deploy.bench.measurement import LoadFigures, RequestResult
from dflash_deploy.bench.play import UNCOUNTED
from dflash_deploy.bench.protocols import Options, Protocol
from dflash_deploy.bench.record import (
    PLAINLY,
    failures_of,
    faults_of,
    file_of,
    round_row,
    run_with,
    tails_of,
    workload_of,
)
from dflash_deploy.bench.results import Failure, LoadRows, Machine, ResultFile, RoundRow, Run
from dflash_deploy.bench.standalone import KEEP_EVERY_S, Keep, Tell, check_answered, player_at
from dflash_deploy.bench.statistics import Comparison, compare_live
from dflash_deploy.errors import DeployError, ExitCode

ALL_AT_ONCE = (
    "answers of one of the two tell no decode speed, as when they come all at once: the two are compared by "
    "all tokens over the wall time"
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
    keep: Keep = lambda _: None,
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
        keep: now and then given what has been measured so far, for the case that this process is killed.

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

    arms: list[_Arm] = []
    kept_at = -math.inf

    def put_down(*, interrupted: bool) -> ResultFile:
        workload = workload_of(replace(protocol, shape="rounds"), options)
        runs = [arm.run() for arm in arms]
        return file_of(runs, workload, machine, simulated=a.simulated, interrupted=interrupted)

    def on_round() -> None:
        nonlocal kept_at
        if time.monotonic() - kept_at >= KEEP_EVERY_S:
            keep(put_down(interrupted=True))
            kept_at = time.monotonic()

    def arms_of(*endpoints: Endpoint) -> list[_Arm]:
        return [
            _Arm(name, endpoint, protocol, options, read_text=read_text, tell=tell, on_round=on_round)
            for name, endpoint in zip("AB", endpoints, strict=True)
        ]

    arms = arms_of(a, b)
    found, interrupted = _in_turn(arms, protocol.rounds, most_rounds)
    if any(arm.may_be_asked_plainly for arm in arms):
        tell("asking both once more, without what is not in OpenAI's interface")
        arms = arms_of(replace(a, extras=False), replace(b, extras=False))
        found, interrupted = _in_turn(arms, protocol.rounds, most_rounds)
    result = put_down(interrupted=interrupted)
    for run in result.runs:
        check_answered(run)
    return result, found


def _in_turn(arms: Sequence[_Arm], least: int, most: int) -> tuple[Comparison | None, bool]:
    """Play both arms' rounds: what they come to, and whether a person ended it."""
    try:
        for arm in arms:
            arm.warm_up()
        by_user = all(arm.tells_user_speed for arm in arms)
        for arm in arms:
            arm.by_user = by_user
        return compare_live(arms[0].play, arms[1].play, min_rounds=min(least, most), max_rounds=most), False
    except _BrokenError:
        return None, False
    except KeyboardInterrupt:
        return None, True


class _BrokenError(Exception):
    """A round did not go well; its arm has the failures."""


class _Arm:
    """One of two live servers, and its rounds until now.

    Attributes:
        by_user: compared by the decode speed of one user, in place of all tokens over the wall time.
    """

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        protocol: Protocol,
        options: Options,
        *,
        read_text: bool,
        tell: Tell,
        on_round: Callable[[], None],
    ) -> None:
        self._name = name
        self._endpoint = endpoint
        self._protocol = protocol
        self._users = protocol.users[0]
        self._read_text = read_text
        self._tell = tell
        self._on_round = on_round
        self._player = player_at(endpoint, protocol, options)
        self._rows: list[RoundRow] = []
        self._results: list[RequestResult] = []
        self._failures: tuple[Failure, ...] = ()
        self.by_user = True

    @property
    def may_be_asked_plainly(self) -> bool:
        """It refused its first round, which held more than OpenAI's interface has."""
        kinds = {one.kind for one in self._failures}
        return self._endpoint.extras and not self._rows and kinds == {"refused"}

    @property
    def tells_user_speed(self) -> bool:
        """One user is asked at a time, and its answers came token by token until now."""
        return self._users == 1 and all(row.user_tokens_per_s for row in self._rows)

    def warm_up(self) -> None:
        for turn in turns(self._protocol.warm_up, 0):
            self._play(turn)

    def play(self) -> float:
        """One round that counts: its speed."""
        number = sum(row.counts for row in self._rows)
        row = self._play(Turn(f"round {number + 1}", "r", number, counts=True))
        speed = row.user_tokens_per_s if self.by_user else row.tokens_per_s
        if not speed:
            what = "decode speed in answers that come all at once" if row.tokens_per_s else "tokens by usage"
            self._failures = (Failure(kind="uncounted", count=1, example=f"{row.name}: no {what}"),)
            raise _BrokenError
        return speed

    def run(self) -> Run:
        """What it has come to."""
        faults = faults_of(
            self._endpoint, self._results, self._protocol.output_tokens, read_text=self._read_text
        )
        figures = LoadFigures.of(self._results) if self._results else None
        rows = LoadRows(users=self._users, rounds=self._rows, tails=tails_of(figures))
        loads = [rows] if self._rows else []
        run = run_with(self._name, self._endpoint, loads, self._failures, faults)
        return run.model_copy(
            update={
                "accept_length": figures.accept_length if figures else None,
                "notes": [
                    *([] if self._endpoint.extras else [PLAINLY]),
                    *([ALL_AT_ONCE] if self._users == 1 and not self.by_user else []),
                    *([UNCOUNTED] if any(one.tokens_estimated for one in self._results) else []),
                ],
            }
        )

    def _play(self, turn: Turn) -> RoundRow:
        self._tell(f"{self._name}: {turn.label}")
        played = asyncio.run(self._player.turn(self._users, turn)).requests
        self._failures = failures_of(played)
        if self._failures:
            raise _BrokenError
        row = round_row(turn.label, played, LoadFigures.of(played), counts=turn.counts)
        self._rows.append(row)
        if turn.counts:
            self._results.extend(played)
        self._on_round()
        return row

"""What a report works out of the records."""

from datetime import UTC, datetime, timedelta

import numpy as np

from dflash_deploy.report.chart import axis, stacked
from dflash_deploy.report.failures import failures_of
from dflash_deploy.report.importance import importance_of
from dflash_deploy.report.pareto import figures_shown, spots
from dflash_deploy.report.schedule import schedule_of
from dflash_deploy.tune.records import trial_folder
from tests.tune import samples

START = datetime(2026, 1, 1, tzinfo=UTC)
SEARCH = {
    "max-running-requests": {"low": 1, "high": 20, "step": 1},
    "disable-radix-cache": {"choices": [True, None]},
}


def measured(number, value, **flags):
    return samples.trial(number, rounds=(value,), flags=flags)


def test_a_parameter_that_decides_is_told_from_one_that_does_not():
    noise = np.random.default_rng(1).normal(0, 0.5, 24)
    trials = [
        measured(
            number,
            100.0 + 5 * (number % 20) + noise[number],
            **{"max-running-requests": number % 20 + 1},
            **({"disable-radix-cache": True} if number % 2 else {}),
        )
        for number in range(24)
    ]
    weights = {one.flag: one for one in importance_of(samples.profile(search=SEARCH), trials).weights}
    assert weights["max-running-requests"].told
    assert weights["max-running-requests"].share > 0.7
    assert not weights["disable-radix-cache"].told
    assert next(iter(weights)) == "max-running-requests", "the largest first"


def test_noise_alone_tells_nothing():
    told = 0
    for seed in range(20):
        values = np.random.default_rng(seed).normal(100, 1, 10)
        trials = [
            measured(number, value, **{"max-running-requests": 1 + number % 4})
            for number, value in enumerate(values)
        ]
        told += any(one.told for one in importance_of(samples.profile(), trials).weights)
    assert told <= 3


def test_too_few_trials_or_equal_ones_have_no_importance():
    few = importance_of(samples.profile(), [measured(number, 1.0) for number in range(7)])
    assert "7 trials have a figure" in few.problem
    equal = importance_of(samples.profile(), [measured(number, 1.0) for number in range(9)])
    assert equal.problem == "all trials have the same figure"


def test_time_is_split_and_pauses_between_runs_are_left_out():
    def one(number, after_s, wall_s, **given):
        return samples.trial(number, started=START + timedelta(seconds=after_s), wall_s=wall_s, **given)

    schedule = schedule_of(
        [
            one(1, 0, 100, rounds=(1.0,), boot_s=600.0),
            one(2, 105, 50),
            one(3, 86_400, 80, rounds=(1.0,), boot_s=300.0),
            one(4, 90_000, 0, argv=[]),
        ],
        time_scale=10.0,
    )
    assert [(one.start_s, one.launch_s, one.measure_s) for one in schedule.stretches] == [
        (0.0, 60.0, 40.0),
        (105.0, 50.0, 0.0),
        (155.0, 30.0, 50.0),
    ]
    assert schedule.between_s == 5.0
    assert schedule.total_s == 235.0


def one(number, total, user, ttft_s=0.2, kv_tokens=10_000, **given):
    spread = samples.Spread
    seen = samples.measurement(
        total_tokens_per_s=spread(total, total, total),
        user_tokens_per_s=spread(user, user, user),
        ttft_s=spread(ttft_s, ttft_s, ttft_s),
    )
    content = {
        "outcome": "served",
        "feasible": True,
        "measured": seen,
        "objective": total,
        "boot": samples.boot(kv_tokens=kv_tokens),
    }
    return samples.trial(number, **(content | given))


def test_the_front_holds_what_nothing_beats_in_all():
    found = spots(
        samples.profile(),
        [
            one(1, 100, 50),
            one(2, 120, 40),
            one(3, 90, 45),
            one(4, 90, 45, ttft_s=0.1),
            one(5, 300, 300, outcome="infeasible", feasible=False),
            one(6, 300, 300, outcome="bad-output", feasible=False),
            samples.trial(7),
        ],
    )
    assert {spot.number: spot.front for spot in found} == {1: True, 2: True, 3: False, 4: True, 5: False}


def test_the_front_is_that_of_the_studys_own_objectives():
    wanted = samples.profile(objective={"optimize": "total_tokens_per_s", "also": ["context_tokens"]})
    trials = [
        one(1, 100, 90, ttft_s=0.1),
        one(2, 120, 40),
        one(3, 90, 45, kv_tokens=20_000),
        one(4, 80, 45, kv_tokens=30_000),
        one(5, 120, 40, proves=2, flags={"max-running-requests": 2}),
        one(6, 80, 45, proves=4, flags={"max-running-requests": 4}, outcome="unstable", feasible=False),
    ]
    assert figures_shown(wanted) == ("total_tokens_per_s", "context_tokens")
    found = {spot.number: (spot.feasible, spot.front) for spot in spots(wanted, trials)}
    assert found == {1: (True, False), 2: (True, True), 3: (True, True), 4: (False, False)}, (
        "a user's speed is no objective, a proof is no trial of its own, and what fell in its proof is out"
    )


def test_a_failure_is_diagnosed_from_its_log(tmp_path):
    log = trial_folder(tmp_path, 1) / "server.log"
    log.parent.mkdir(parents=True)
    log.write_text(
        "[2026-01-01 00:00:00] server_args=ServerArgs(model_path='m')\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.20 GiB. GPU 0 has a total capacity "
        "of 31.36 GiB of which 20.00 MiB is free.\n"
    )
    first, second = failures_of(
        tmp_path, [samples.trial(1, reason="load: died"), samples.trial(2, reason="x")]
    )
    assert "memory" in first.diagnosis
    assert second.diagnosis is None


def test_axes_have_round_ticks_within_and_show_every_value():
    for values in ([3.2, 9.7], [0.0, 0.0], [-5.0, 1e6], [101.4, 102.0], []):
        one = axis(values, 0.0, 100.0)
        assert all(0 <= one.place(value) <= 100 for value in values)
        assert 1 <= len(one.ticks) <= 12
        assert all(-1e-6 <= place <= 100 + 1e-6 for place, _ in one.ticks)


def test_pieces_of_a_bar_lie_side_by_side():
    pieces = stacked([("a", 1.0, ""), ("b", 0.0, ""), ("c", 3.0, "")], full=8.0, width=80.0)
    assert [(piece.kind, piece.x, piece.width) for piece in pieces] == [("a", 0.0, 10.0), ("c", 10.0, 30.0)]
    assert stacked([("a", 1.0, "")], full=0.0, width=80.0) == []

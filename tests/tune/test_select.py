import pytest

from dflash_deploy.tune.select import best_trial, gain, spread_of

from .samples import study, trial

STUDY = study()


def test_the_best_is_the_highest_of_the_feasible():
    trials = [
        trial(1, (100.0, 101.0, 99.0)),
        trial(2, (110.0, 111.0, 109.0)),
        trial(3, (190.0, 191.0, 189.0), outcome="bad-output", feasible=False),
        trial(4),
    ]
    assert best_trial(STUDY, trials).number == 2


def test_nothing_feasible_has_no_best():
    assert best_trial(STUDY, []) is None
    assert best_trial(STUDY, [trial(1), trial(2, (9.0,), outcome="infeasible", feasible=False)]) is None


def test_of_latencies_the_lowest_is_the_best():
    quick = study(objective={"optimize": "latency_s"})
    trials = [trial(1, (100.0,), objective=2.0), trial(2, (80.0,), objective=2.5)]
    assert best_trial(quick, trials).number == 1
    assert gain(trials[0], trials[1], "latency_s").median == pytest.approx(0.25)


def test_a_known_setting_is_kept_where_the_rounds_do_not_agree_that_another_is_better():
    known = trial(1, (100.0, 102.0, 98.0), source="known:hand")
    assert best_trial(STUDY, [known, trial(2, (101.0, 103.0, 97.5))]).number == 1
    assert best_trial(STUDY, [known, trial(2, (101.0, 103.0, 98.5))]).number == 2


def test_rounds_are_compared_one_by_one_though_they_differ_a_lot_among_themselves():
    # Round by round 5 % better, although the spread within each trial is fourfold.
    slow, quick = trial(1, (100.0, 200.0, 400.0)), trial(2, (105.0, 210.0, 420.0))
    found = gain(quick, slow, "total_tokens_per_s")
    assert found.distinguishable
    assert (found.low, found.median, found.high) == pytest.approx((0.05, 0.05, 0.05))


def test_worse_is_distinguishable_too():
    assert gain(trial(1, (90.0, 91.0)), trial(2, (100.0, 100.0)), "total_tokens_per_s").distinguishable


def test_no_figure_no_gain():
    assert gain(trial(1), trial(2, (1.0,)), "total_tokens_per_s") is None
    assert spread_of(trial(1), "total_tokens_per_s") is None


def test_of_equals_the_first_is_taken():
    assert best_trial(STUDY, [trial(1, (100.0,)), trial(2, (100.0,))]).number == 1


def test_the_spread_is_over_rounds():
    spread = spread_of(trial(1, (100.0, 90.0, 130.0)), "total_tokens_per_s")
    assert (spread.median, spread.low, spread.high) == (100, 90, 130)

from dataclasses import replace

import pytest

from dflash_deploy.tune.gain import gain, interval_of, spread_of
from dflash_deploy.tune.records import Exam, Proof
from dflash_deploy.tune.select import best_trial

from .samples import boot, measurement, study, trial

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
    assert best_trial(STUDY, [known, trial(2, (101.0, 103.0, 98.9))]).number == 2


def test_rounds_are_compared_one_by_one_though_they_differ_a_lot_among_themselves():
    # Round by round 5 % better, although the spread within each trial is fourfold.
    slow, quick = trial(1, (100.0, 200.0, 400.0)), trial(2, (105.0, 210.0, 420.0))
    found = gain(quick, slow, "total_tokens_per_s")
    assert found.distinguishable
    assert (found.low, found.median, found.high) == pytest.approx((0.05, 0.05, 0.05))


def test_the_interval_is_wide_where_three_rounds_differ_and_nothing_is_claimed():
    # Each round is better, and yet three such rounds come by chance.
    found = gain(trial(2, (100.1, 101.0, 104.0)), trial(1, (100.0,) * 3), "total_tokens_per_s")
    assert found.low < 0 < found.high
    assert not found.distinguishable


def test_one_round_tells_no_interval_and_claims_nothing():
    found = gain(trial(2, (150.0,)), trial(1, (100.0,)), "total_tokens_per_s")
    assert (found.median, found.low, found.high) == (pytest.approx(0.5), None, None)
    assert not found.distinguishable


def test_a_round_without_a_figure_is_no_ground_for_a_gain():
    seen = measurement((150.0, 160.0))
    broken = replace(seen, per_round=(seen.per_round[0], replace(seen.per_round[1], total_tokens_per_s=0.0)))
    other = trial(2, (150.0, 160.0)).model_copy(update={"measured": broken})
    assert gain(other, trial(1, (100.0, 100.0)), "total_tokens_per_s") is None


def test_worse_is_distinguishable_too():
    slow, quick = trial(1, (90.0, 91.0, 90.5)), trial(2, (100.0, 100.0, 100.5))
    assert gain(slow, quick, "total_tokens_per_s").distinguishable


def test_no_figure_no_gain():
    assert gain(trial(1), trial(2, (1.0,)), "total_tokens_per_s") is None
    assert spread_of(trial(1), "total_tokens_per_s") is None


def test_of_equals_the_first_is_taken():
    assert best_trial(STUDY, [trial(1, (100.0,)), trial(2, (100.0,))]).number == 1


def test_the_spread_is_over_rounds():
    spread = spread_of(trial(1, (100.0, 90.0, 130.0)), "total_tokens_per_s")
    assert (spread.median, spread.low, spread.high) == (100, 90, 130)


def test_the_interval_of_a_figure_is_that_of_the_statistics_and_not_the_range():
    found = interval_of(trial(1, (100.0, 101.0, 102.0)), "total_tokens_per_s")
    assert found.low < 99
    assert found.high > 103
    assert interval_of(trial(1, (100.0,)), "total_tokens_per_s") is None


LIMITED = study(
    objective={"optimize": "total_tokens_per_s", "constraints": {"free_vram_mib": {"min": 500}}},
    search={"method": {"choices": ["dflash", "mtp"]}, "chunked-prefill-size": {"choices": [512, 4096]}},
)


def soaked(number, speed, used_mib, *, free_mib=None, proves=None, wrong=False, **flags):
    """A trial on a card of 30,000 MiB; the proof of one, where ``free_mib`` was left under the promise."""
    flags |= {"mem_fraction_static": used_mib / 30_000}
    given = {"flags": {name.replace("_", "-"): value for name, value in flags.items()}}
    chunk = given["flags"].get("chunked-prefill-size")
    given |= {"measured": measurement((speed,), vram_used_mib=used_mib, vram_total_mib=30_000)}
    given |= {"boot": boot(chunked_prefill_size=chunk)}
    if proves is not None:
        exam = Exam(asked=22, right=3, missed={}, faults=("x: y",), repeated=3, repeated_same=3, refused=0)
        proof = Proof(
            seconds=9.0,
            answer_tokens=64,
            context_tokens=1000,
            promised_tokens=1000,
            free_mib=free_mib,
            kv_tokens=4000,
            exam=exam if wrong else None,
            problem="x: y",
        )
        outcome = "bad-output" if wrong else "infeasible"
        given |= {"proves": proves, "proof": proof, "outcome": outcome, "feasible": False}
    return trial(number, (speed,), **given)


def left(*trials):
    best = best_trial(LIMITED, trials)
    return best.number if best else None


@pytest.mark.parametrize(("wrong", "number"), [(True, 1), (False, None)])
def test_wrong_answers_put_one_configuration_out_and_too_little_memory_all_that_take_as_much(wrong, number):
    other = soaked(1, 100.0, 29_000, max_running_requests=3)
    best = soaked(2, 120.0, 29_000, max_running_requests=2)
    proof = soaked(3, 120.0, 29_000, max_running_requests=2, proves=2, free_mib=100, wrong=wrong)
    assert left(other, best, proof) == number


def test_what_long_use_takes_is_forecast_for_what_is_alike():
    # 29,300 MiB while it was measured and 29,800 in long use: 500 more, with chunks of 4096.
    best = soaked(1, 140.0, 29_300, method="mtp", chunked_prefill_size=4096)
    proof = soaked(2, 140.0, 29_300, method="mtp", chunked_prefill_size=4096, proves=1, free_mib=200)
    less = soaked(3, 130.0, 29_100, method="mtp", chunked_prefill_size=4096)
    assert left(best, proof, less) is None, "it took less, and 29,600 of 29,500 would come of it"
    little = soaked(4, 130.0, 28_900, method="mtp", chunked_prefill_size=4096)
    assert left(best, proof, little) == 4
    small_chunks = soaked(5, 130.0, 29_400, method="mtp", chunked_prefill_size=512)
    assert left(best, proof, small_chunks) == 5, "its prompts come in pieces of an eighth"
    other_method = soaked(6, 130.0, 29_400, method="dflash", chunked_prefill_size=4096)
    assert left(best, proof, other_method) == 6, "its own proof will tell"
    again = soaked(7, 130.0, 29_400, method="dflash", chunked_prefill_size=4096, proves=6, free_mib=400)
    assert left(best, proof, other_method, again, little) == 4


def test_a_server_that_died_of_something_else_with_memory_to_spare_puts_out_its_own_configuration_alone():
    best = soaked(1, 140.0, 29_300, max_running_requests=2)
    died = soaked(2, 140.0, 29_300, max_running_requests=2, proves=1, free_mib=600)
    other = soaked(3, 130.0, 29_300, max_running_requests=3)
    assert left(best, died, other) == 3
    starved = died.model_copy(update={"outcome": "unstable", "reason": "died: CUDA out of memory"})
    assert left(best, starved, other) is None

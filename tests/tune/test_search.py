"""The search on a virtual clock: the very code of ``tune``, a trial in milliseconds."""

import json
import sys
from pathlib import Path

import pytest

from dflash_deploy.bench.measurement import Spread
from dflash_deploy.profile.load import load_profile
from dflash_deploy.tune.feasible import Forecaster
from dflash_deploy.tune.launching import shared_flags
from dflash_deploy.tune.records import Proof
from dflash_deploy.tune.search import Proposal, Search, Stop
from dflash_deploy.tune.select import best_of
from dflash_deploy.tune.space import key_of, space_of

from .samples import boot, measurement, profile, trial

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from virtual_trial import VirtualCard

CARD_MIB = {"rtx-5090": 32607, "rtx-3090": 24576}


class Played:
    """One search, played to its end."""

    def __init__(self, name, seed, known=True, cut_after=None, *, overrides=(), knowing=None):
        self.profile = load_profile(name, overrides=overrides)
        for one in self.profile.known:
            one.flags.update(knowing or {})
        self.card = VirtualCard(self.profile, self.profile.card, seed, 64, CARD_MIB[self.profile.card])
        self.records = []
        self.whys = []
        self.known = known
        search = self.search()
        while len(self.records) < 30:
            if len(self.records) == cut_after:
                search = self.search()
            step = search.ask()
            if isinstance(step, Stop):
                self.stop = step
                break
            self.whys.append(step.why)
            record = self.card.run(step.settings, number=len(self.records) + 1, source=step.source)
            if step.proves is not None:
                record = self.card.proven(record, step.proves, step.settings)
            self.tell(search, record)
            self.records.append(record)

    def search(self):
        forecaster = Forecaster(self.profile, "0.5.23", CARD_MIB[self.profile.card])
        known = [
            Proposal(space_of(self.profile).whole(known.flags), f"known:{known.name}", "known")
            for known in self.profile.known
        ]
        from dflash_deploy.machine.cards import load_card

        card = load_card(self.profile.card)
        search = Search(
            space_of(self.profile),
            forecaster,
            goal=self.profile.objective.optimize,
            rate=lambda flags: forecaster.rate(flags, card),
            shared=shared_flags(self.profile, simulated=True),
            seed=3,
            known=known if self.known else (),
        )
        for record in self.records:
            self.tell(search, record)
        return search

    @staticmethod
    def tell(search, record):
        search.forecaster = search.forecaster.after(record)
        search.tell(record)

    @property
    def best(self):
        return max(record.objective for record in self.records if record.feasible)


@pytest.fixture(scope="module")
def four_users():
    return Played("rtx5090-four-users", 11)


def test_known_settings_come_first_and_little_is_launched_after_them(four_users):
    assert four_users.records[0].source == "known:hand-tuned"
    assert four_users.stop.reason == "gain"
    assert "less than the noise" in four_users.stop.why
    assert len(four_users.records) < 20
    assert four_users.best > 1.01 * four_users.records[0].objective
    assert four_users.records[-1].proof.problem is None, "the last launch proves the best"


def test_nothing_is_launched_twice_and_nothing_runs_out_of_memory(four_users):
    tried = [key_of(record.flags) for record in four_users.records if record.proves is None]
    assert len(set(tried)) == len(tried)
    outcomes = {record.outcome for record in four_users.records if record.proves is None}
    assert outcomes <= {"served", "infeasible"}
    assert all(four_users.whys)


def test_a_search_that_was_cut_short_goes_on_as_if_nothing_had_been(four_users):
    again = Played("rtx5090-four-users", 11, cut_after=2)
    assert [record.flags for record in again.records] == [record.flags for record in four_users.records]


def test_without_known_settings_the_plan_begins():
    played = Played("rtx3090-single-user", 12, known=False)
    assert played.whys[0] == "the plan's favourite"
    assert played.records[0].feasible
    assert played.best > Played("rtx3090-single-user", 12).records[0].objective


def test_the_longest_context_is_sought_up_to_the_limits_and_not_beyond():
    played = Played("rtx5090-long-context", 13)
    first = played.records[0].objective
    best = max((r for r in played.records if r.feasible), key=lambda record: record.objective)
    assert best.objective > 1.5 * first
    free_mib = best.measured.vram_total_mib - best.measured.vram_used_mib
    assert 512 <= free_mib < 1300


NARROW = (
    *(f"search.{flag}=" for flag in ("cuda-graph-bs-decode", "max-running-requests", "disable-radix-cache")),
    *(f"search.{flag}=" for flag in ("chunked-prefill-size", "attention-backend", "kv-cache-dtype")),
    *(
        f"search.{flag}="
        for flag in ("mamba-ssm-dtype", "disable-prefill-cuda-graph", "max-mamba-cache-size")
    ),
    "search.max-total-tokens=",
)
"""The four users' profile with little left to choose: what its known setting says holds."""


def narrow(*overrides, **given):
    known = load_profile("rtx5090-four-users").known[0].flags
    searched = ("speculative-num-draft-tokens", "mem-fraction-static")
    fixed = [f"flags.{flag}={json.dumps(value)}" for flag, value in known.items() if flag not in searched]
    return Played("rtx5090-four-users", 12, overrides=[*NARROW, *fixed, *overrides], **given)


def test_methods_cost_a_launch_or_two_and_lose_nothing():
    plain = narrow()
    played = narrow("search.method={choices: [dflash, dspark, mtp, ngram, none]}")
    assert played.best > 0.99 * plain.best
    assert len(played.records) <= len(plain.records) + 4
    tried = [record.flags["method"] for record in played.records]
    assert set(tried) > {"dflash"}, "the prior may be wrong of a method, and one launch tells"
    assert "none" not in tried, "a third of the speed is no prior's mistake"
    others = [record.flags for record in played.records if record.flags["method"] == "dspark"]
    assert len(others) == len({key_of(flags) for flags in others})
    assert all("speculative-num-draft-tokens" not in flags for flags in others), "it has a block of its own"


def test_leaving_a_variable_unset_is_tried_and_preferred():
    played = narrow("search.env.OMP_NUM_THREADS.choices=[4, null]", knowing={"env.OMP_NUM_THREADS": "4"})
    assert played.records[0].flags["env.OMP_NUM_THREADS"] == "4"
    assert any(
        record.source.startswith("without:") and "env.OMP_NUM_THREADS" in record.source
        for record in played.records
    )
    unknown = narrow("search.env.OMP_NUM_THREADS.choices=[4, null]", known=False)
    assert "env.OMP_NUM_THREADS" not in best_of(unknown.profile, unknown.records).flags


def searched(search_space, **given):
    """A search where nothing is planned: no card is known."""
    tuned = profile(search=search_space, **given)
    return Search(
        space_of(tuned),
        Forecaster(tuned, "0.5.23", None),
        goal="total_tokens_per_s",
        rate=lambda _: None,
        shared={},
        seed=1,
    )


def play(search, value, count=40):
    """Ask and tell until it stops; ``value`` of the flags is None where the start fails."""
    records = []
    while len(records) < count:
        step = search.ask()
        if isinstance(step, Stop):
            return records, step
        if step.proves is not None:
            proof = Proof(
                seconds=1.0,
                answer_tokens=64,
                context_tokens=64,
                promised_tokens=64,
                free_mib=None,
                kv_tokens=None,
                problem=None,
            )
            again = trial(len(records) + 1, (100.0,), flags=step.settings, proves=step.proves, proof=proof)
            search.tell(again)
            records.append(again)
            continue
        found = value(step.settings)
        record = (
            trial(len(records) + 1, (found,), flags=step.settings, boot=boot())
            if found
            else trial(
                len(records) + 1, None, flags=step.settings, reason="pools: CUDA out of memory", boot=boot()
            )
        )
        search.tell(record)
        records.append(record)
    return records, None


def test_a_small_space_is_tried_out_and_then_there_is_nothing_left():
    search = searched({"max-running-requests": {"choices": [1, 2, 3, 4, 5]}})
    records, stop = play(search, lambda _: 100.0)
    # Fewer than two users at once would be of no use.
    tried = [record.flags["max-running-requests"] for record in records if record.proves is None]
    assert sorted(tried) == [2, 3, 4, 5]
    assert stop.reason in ("exhausted", "gain")


def test_without_a_plan_it_learns_from_what_it_measures():
    space = {
        "speculative-num-draft-tokens": {"low": 2, "high": 16, "step": 1},
        "chunked-prefill-size": {"choices": [512, 1024, 2048]},
    }
    search = searched(space)
    records, _ = play(search, lambda flags: 100.0 - 2 * abs(flags["speculative-num-draft-tokens"] - 11))
    best = max(records, key=lambda record: record.objective)
    assert abs(best.flags["speculative-num-draft-tokens"] - 11) <= 1
    assert len(records) < 20


def test_what_misses_a_limit_by_a_hair_is_not_launched_in_every_form_of_it():
    space = {
        "attention-backend": {"choices": ["flashinfer", "triton"]},
        "schedule-conservativeness": {"choices": [0.5, 0.7, 0.9, 1.0, 1.1, 1.3]},
        "disable-radix-cache": {"choices": [True, False]},
        "chunked-prefill-size": {"choices": [1024, 2048, 4096]},
    }
    limits = {"optimize": "total_tokens_per_s", "constraints": {"latency_s": {"max": 2.0}}}

    def measured(settings, number):
        quick = settings["attention-backend"] == "flashinfer"
        given = {"flags": settings, "boot": boot()}
        if quick:
            spread = Spread(1.5, 1.5, 1.5)
            return trial(number, (100.0,), measured=measurement((100.0,), latency_s=spread), **given)
        spread = Spread(2.004, 2.004, 2.004)
        return trial(
            number,
            (150.0,),
            outcome="infeasible",
            feasible=False,
            violations={"latency_s": 0.002},
            measured=measurement((150.0,), latency_s=spread),
            **given,
        )

    search = searched(space, objective=limits)
    records = []
    while len(records) < 40 and isinstance(step := search.ask(), Proposal) and step.proves is None:
        records.append(measured(step.settings, len(records) + 1))
        search.tell(records[-1])
    missed = [record for record in records if not record.feasible]
    assert 1 <= len(missed) < 18, "there are 36 such configurations"


def test_what_is_hungrier_than_what_ran_out_of_memory_is_not_tried():
    space = {"mem-fraction-static": {"low": 0.80, "high": 0.95, "step": 0.01}}
    search = searched(space)
    records, stop = play(search, lambda flags: 100.0 if flags["mem-fraction-static"] <= 0.84 else None)
    failed = [record.flags["mem-fraction-static"] for record in records if not record.feasible]
    assert failed == sorted(failed, reverse=True), "each failure is below the one before it"
    assert len(failed) <= 6
    assert stop is not None


def test_what_others_try_now_is_not_proposed():
    search = searched({"max-running-requests": {"choices": [2, 3]}})
    first = search.ask()
    second = search.ask(pending=[first.settings])
    assert second.settings != first.settings
    assert isinstance(search.ask(pending=[first.settings, second.settings]), Stop)

"""Advice keeps its word: what it promises is what the changed configuration gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_deploy.checkpoint.cards import load_model_card
from dflash_deploy.plan.advice import advise
from dflash_deploy.plan.budget import Advice, Budget
from dflash_deploy.plan.vram import Question, plan

from .test_vram import BF16_STATE, DFLASH, DFLASH2, FOUR_USERS, FP8, ONE_USER, RTX_5090_MIB, TARGET


def question(flags: dict, users: int = 1, **others: object) -> Question:
    given = {"card_memory_mib": RTX_5090_MIB, "target": TARGET, "draft": DFLASH2, "version": "0.5.23"}
    return Question(**{**given, **others}, flags=flags, users=users)


def followed(asked: Question, advice: Advice) -> Budget:
    flags = {name: value for name, value in {**asked.flags, **advice.flags}.items() if value is not None}
    return plan(replace(asked, flags=flags))


def by_id(asked: Question) -> dict[str, Advice]:
    return {advice.id: advice for advice in advise(asked)}


UNCAPPED = {name: value for name, value in FOUR_USERS.items() if name != "max-total-tokens"}
FIVE_SLOTS = {**ONE_USER, "mamba-radix-cache-strategy": "auto"}
PLAIN_DEFAULTS = {**DFLASH, "mem-fraction-static": 0.85}


@pytest.mark.parametrize(
    ("flags", "users"),
    [
        (UNCAPPED, 4),
        (FIVE_SLOTS, 1),
        (PLAIN_DEFAULTS, 1),
        (PLAIN_DEFAULTS, 2),
        (ONE_USER, 1),
        (FOUR_USERS, 4),
    ],
)
def test_what_is_said_to_fit_fits(flags: dict, users: int):
    asked = question(flags, users)
    now = plan(asked)
    found = advise(asked)
    assert found
    for advice in found:
        then = followed(asked, advice)
        assert ("it fits" in advice.text) == (then.fits and not now.fits)
        assert then.fits or not now.fits
        assert advice.cost
        assert advice.flags


def test_a_pool_that_is_too_large_is_capped_as_the_hand_tuned_setting_is():
    advice = by_id(question(UNCAPPED, 4))["cap-tokens"]
    assert 6_000 <= advice.flags["max-total-tokens"] <= 12_000
    assert followed(question(UNCAPPED, 4), advice).fits


def test_four_slots_and_five_a_request():
    advice = by_id(question(FIVE_SLOTS))
    assert advice["lazy-state"].flags["mamba-radix-cache-strategy"] == "extra_buffer_lazy"
    assert advice["state-slots"].flags["max-mamba-cache-size"] == 5
    assert followed(question(FIVE_SLOTS), advice["lazy-state"]).max_running_requests == 1


def test_several_changes_where_one_is_not_enough():
    asked = question(PLAIN_DEFAULTS)
    first = advise(asked)[0]
    assert first.id == "together"
    assert first.flags["mamba-ssm-dtype"] == "bfloat16"
    assert followed(asked, first).fits


def test_fewer_draft_tokens_free_their_states():
    advice = by_id(question(FOUR_USERS, 4))["draft-tokens-6"]
    freed = plan(question(FOUR_USERS, 4)).predicted_peak_mib
    freed -= followed(question(FOUR_USERS, 4), advice).predicted_peak_mib
    assert freed > 5 * 72 * 2
    assert f"{freed:,.0f} MiB" in advice.text


def test_a_fraction_that_leaves_memory_unused_is_raised():
    advice = by_id(question(ONE_USER))["raise-fraction"]
    then = followed(question(ONE_USER), advice)
    assert then.fits
    assert then.kv_tokens > 2 * plan(question(ONE_USER)).kv_tokens


def test_a_roomy_card_needs_nothing_but_tokens():
    asked = question({**DFLASH, **BF16_STATE, **FP8, "max-running-requests": 1}, card_memory_mib=97_887)
    assert not any("it fits" in advice.text for advice in advise(asked))


def test_a_dense_model_gets_no_state_advice():
    asked = question({"mem-fraction-static": 0.5}, target=load_model_card("qwen3-8b"), draft=None)
    assert not {"bf16-state", "lazy-state", "state-slots", "no-radix"} & set(by_id(asked))


def test_json_has_the_documented_keys():
    asked = question(UNCAPPED, 4)
    told = plan(asked).as_json(advise(asked))
    assert {
        "pools",
        "kv_tokens",
        "state_slots",
        "slots_per_request",
        "max_running_requests",
        "context_per_user",
        "predicted_peak_mib",
        "headroom_mib",
        "fits",
        "fails_at",
        "binding_pool",
        "advice",
    } <= set(told)
    assert told["pools"]["target KV"].keys() == {"mib", "kind"}
    assert {pool["kind"] for pool in told["pools"].values()} == {"exact", "empirical"}
    assert all(set(advice) == {"id", "text", "flags", "cost"} for advice in told["advice"])


def test_what_costs_speed_is_not_advised_where_memory_is_enough():
    roomy = question({**ONE_USER, "language-model-only": True, "mem-fraction-static": 0.88})
    assert plan(roomy).headroom_mib > 1024
    costly = {"draft-tokens-6", "draft-tokens-4", "smaller-chunk", "no-prefill-graphs", "no-radix"}
    assert not costly & set(by_id(roomy))
    assert costly & {advice.id for advice in advise(roomy, context_tokens=200_000)}


def test_unified_memory_keeps_what_the_host_needs():
    """The host's guard ends a server where less than 8 GiB are left."""
    flags = {name: value for name, value in ONE_USER.items() if name != "mem-fraction-static"}
    spark = question({**flags, "mem-fraction-static": 0.6}, card_memory_mib=124_610)
    then = followed(spark, by_id(spark)["raise-fraction"])
    assert then.headroom_mib >= 8192


def test_a_step_that_is_not_enough_is_told_only_where_nothing_is():
    hopeless = question({}, target=load_model_card("qwen3.8-27b-fp8"), draft=None)
    told = advise(hopeless)
    assert told
    assert not any(advice.makes_fit for advice in told)
    assert all("not enough alone" in advice.text for advice in told)
    for asked in (question(UNCAPPED, 4), question(PLAIN_DEFAULTS)):
        assert all(advice.makes_fit for advice in advise(asked))

"""Explanations: the numbers in the words come to the pool's size."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_deploy.checkpoint.cards import list_model_cards, load_model_card
from dflash_deploy.plan.explain import explained
from dflash_deploy.plan.terms import Terms
from dflash_deploy.plan.vram import Question, plan

from .test_vram import BF16_STATE, DFLASH, DFLASH2, DSPARK, FOUR_USERS, FP8, MTP, ONE_USER, TARGET

EAGLE = {"speculative-algorithm": "EAGLE", "speculative-num-steps": 3, **FP8, **BF16_STATE}
REPLAY = {**EAGLE, "enable-linear-replayssm-spec": True}
DSPARK_FLAGS = {"speculative-algorithm": "DSPARK", "speculative-dspark-block-size": 7}


def asked(flags: dict, draft=DFLASH2, card_memory_mib: int = 97_887, **others: object) -> Question:
    given = {"target": TARGET, "version": "0.5.23", "users": 1, **others}
    return Question(card_memory_mib, draft=draft, flags=flags, **given)


CASES = [
    asked(ONE_USER, card_memory_mib=32607),
    asked(FOUR_USERS, card_memory_mib=32607),
    asked({**DFLASH, "page-size": 64, "chunked-prefill-size": 2048}),
    asked({**DFLASH, "tp-size": 2, "language-model-only": True}),
    asked(DSPARK_FLAGS, draft=DSPARK),
    asked(EAGLE, draft=MTP),
    asked(REPLAY, draft=MTP),
    asked(REPLAY, draft=MTP, version="0.5.18"),
    asked({}, draft=None, other_mib=700.0),
    asked({}, draft=None, free_mib=90_000.0),
    asked(DFLASH, terms=Terms(after_load=-40.0, graphs=1.7, prefill_graphs=0.5, target_weights=20_000.0)),
]
CASES += [asked({}, draft=None, target=card) for card in list_model_cards() if card.role == "target"]


@pytest.mark.parametrize(
    "question", CASES, ids=lambda question: f"{question.target.id} {question.flags}"[:60]
)
def test_the_numbers_come_to_the_pool(question: Question):
    budget = plan(question)
    found = explained(question, budget)
    assert found.keys() == budget.sizes.keys(), "each pool is explained"
    for name, formula in found.items():
        assert formula.text
        if formula.mib is not None:
            assert formula.mib == pytest.approx(budget.sizes[name], rel=1e-6, abs=1e-6), (name, formula.text)
        else:
            assert name not in budget.exact


def test_words_have_the_numbers_of_this_configuration():
    question = asked(FOUR_USERS, card_memory_mib=32607)
    found = explained(question, plan(question))
    assert found["verify ssm"].text.startswith(
        "5 requests (one of them padding) x 8 draft tokens x 75,497,472"
    )
    assert "8,193 tokens (8,192 and padding) x 16 layers x 4 KV heads" in found["target KV"].text
    assert "x 1 byte" in found["target KV"].text


@settings(max_examples=60)
@given(
    st.sampled_from(CASES),
    st.fixed_dictionaries(
        {},
        optional={
            "mem-fraction-static": st.floats(0.3, 0.97),
            "max-running-requests": st.integers(1, 300),
            "max-mamba-cache-size": st.integers(1, 600),
            "max-total-tokens": st.integers(100, 10**6),
            "disable-radix-cache": st.booleans(),
            "cuda-graph-bs-decode": st.lists(st.integers(1, 64), min_size=1, max_size=5).map(tuple),
            "disable-cuda-graph": st.booleans(),
            "swa-full-tokens-ratio": st.floats(0.1, 1.0),
        },
    ),
)
def test_any_configuration(question: Question, flags: dict):
    question = dataclasses.replace(question, flags={**question.flags, **flags})
    budget = plan(question)
    found = explained(question, budget)
    assert found.keys() == budget.sizes.keys()
    for name, formula in found.items():
        if formula.mib is not None and not budget.certain:
            assert formula.mib == pytest.approx(budget.sizes[name], rel=1e-6, abs=1e-6), (name, formula.text)


def test_a_dense_model_has_no_state():
    question = asked({}, draft=None, target=load_model_card("qwen3-8b"))
    assert not any("state" in name for name in explained(question, plan(question)))

"""Speed: published figures lie within the range that is given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.checkpoint.cards import load_model_card
from dflash_deploy.machine.cards import load_card
from dflash_deploy.plan.speed import accept_length, estimate, speculation_advice, starting_draft_tokens
from dflash_deploy.plan.vram import Question

from .test_vram import DFLASH2, FOUR_USERS, FP8, MTP, ONE_USER, TARGET

BF16 = load_model_card("qwen3.8-27b-bf16")
W4A16 = load_model_card("qwen3.8-27b-w4a16")
NEXTN = {"speculative-algorithm": "NEXTN", **FP8}


def speed(card: str, flags: dict, *, users: int = 1, target=TARGET, draft=None, **others: object):
    known = load_card(card)
    question = Question(known.memory_mib, target, draft, flags, "0.5.23", users)
    return estimate(question, known, **others)


@pytest.mark.parametrize(
    ("card", "target", "tokens_per_s"),
    [
        ("rtx-5090", TARGET, 59.4),
        ("rtx-5090", TARGET, 62.14),
        ("rtx-pro-6000", TARGET, 65.59),
        ("rtx-3090", W4A16, 45.75),
        ("dgx-spark", TARGET, 12.56),
        ("h200", BF16, 68.8),
        ("a100-80gb", BF16, 28.9),
    ],
)
def test_plain_speeds(card: str, target, tokens_per_s: float):
    found = speed(card, FP8, target=target)
    assert found.user_tokens_per_s.low <= tokens_per_s <= found.user_tokens_per_s.high
    assert found.user_tokens_per_s.high < found.roofline_tokens_per_s
    assert found.accept_length is None


@pytest.mark.parametrize(
    ("card", "flags", "target", "draft", "users", "user", "total"),
    [
        ("rtx-5090", ONE_USER, TARGET, DFLASH2, 1, 207.52, 207.52),
        ("rtx-5090", FOUR_USERS, TARGET, DFLASH2, 4, 192.30, 719.84),
        ("rtx-pro-6000", {**ONE_USER}, TARGET, DFLASH2, 1, 225.17, 225.17),
        ("rtx-pro-6000", NEXTN, TARGET, MTP, 1, 141.0, 141.0),
        ("h200", {**ONE_USER}, BF16, DFLASH2, 1, 236.1, 236.1),
    ],
)
def test_speculative_speeds(card, flags, target, draft, users, user, total):  # noqa: PLR0917
    found = speed(card, flags, target=target, draft=draft, users=users)
    assert found.user_tokens_per_s.low <= user <= found.user_tokens_per_s.high
    assert found.total_tokens_per_s.low <= total <= found.total_tokens_per_s.high
    assert found.user_tokens_per_s.high < 3 * found.user_tokens_per_s.low


def test_without_decode_graphs_speculation_gains_nothing():
    off = speed("rtx-5090", {**ONE_USER, "cuda-graph-backend-decode": "disabled"}, draft=DFLASH2)
    assert off.user_tokens_per_s.low <= 63.85 <= off.user_tokens_per_s.high


def test_prose_is_harder_than_code():
    prose = speed("rtx-5090", ONE_USER, draft=DFLASH2, tasks={"prose": 1.0})
    code = speed("rtx-5090", ONE_USER, draft=DFLASH2, tasks={"code": 1.0})
    assert prose.accept_length.low <= 2.5 <= prose.accept_length.high
    assert code.accept_length.low <= 5.2 <= code.accept_length.high
    assert prose.user_tokens_per_s.high < code.user_tokens_per_s.high


def test_long_contexts_are_slower():
    short, long = (
        speed("rtx-5090", FP8, context_tokens=tokens).user_tokens_per_s.high for tokens in (1_000, 80_000)
    )
    assert 0.80 < long / short < 0.95, "69.3 fell to 60.8 at 80,000 tokens"


@pytest.mark.parametrize(
    ("tasks", "tokens"),
    [
        ({"instruction": 1.0}, 8),
        ({"code": 0.5, "math": 0.5}, 8),
        ({"instruction": 0.6, "prose": 0.4}, 6),
        ({"prose": 0.9, "code": 0.1}, 4),
        ({}, 8),
    ],
)
def test_where_to_begin(tasks: dict, tokens: int):
    assert starting_draft_tokens(tasks) == tokens


def test_when_speculation_is_not_worth_it():
    def advised(flags: dict = ONE_USER, users: int = 1, draft=DFLASH2, **others: object) -> set[str]:
        question = Question(32607, TARGET, draft, flags, "0.5.23", users)
        return {advice.id for advice in speculation_advice(question, **others)}

    assert advised() == set()
    assert advised(users=33) == {"speculation-many-requests"}
    assert advised(output_tokens=20) == {"speculation-short-answers"}
    assert advised(draft=None) == {"speculation-no-draft"}
    assert advised(tasks={"prose": 1.0}) == {"speculation-free-prose", "draft-tokens-start"}
    assert advised(tasks={"instruction": 1.0}) == set()
    assert advised(flags=FP8, users=64, output_tokens=1) == set()


@given(
    st.integers(1, 64),
    st.dictionaries(st.sampled_from(["instruction", "code", "math", "prose", "other"]), st.floats(0, 5)),
    st.floats(0.1, 1.0),
)
def test_accept_lengths_are_lengths(draft_tokens: int, tasks: dict, method: float):
    found = accept_length(draft_tokens, tasks, method=method)
    assert 1 <= found.low <= found.high + 1e-9
    assert found.high <= draft_tokens + 1e-9 or not tasks

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.bench.prompts import mixed_prompts
from dflash_deploy.bench.workloads import TASKS


def test_the_order_is_always_the_same_and_a_longer_run_begins_like_a_shorter_one():
    mix = {"code": 0.5, "math": 0.5}
    assert mixed_prompts(mix, 40)[:10] == mixed_prompts(mix, 10)


def test_answers_of_fixed_length_are_asked_of_questions_that_want_long_ones():
    assert all(prompt.long for prompt in mixed_prompts({"code": 1, "prose": 1}, 60))
    assert {prompt.task for prompt in mixed_prompts({"tools": 1}, 5)} == {"tools"}


@given(
    weights=st.dictionaries(st.sampled_from(TASKS), st.floats(0, 10), min_size=1).filter(
        lambda mix: sum(mix.values()) > 0.01
    ),
    count=st.integers(1, 60),
)
def test_the_mix_keeps_to_its_weights_at_every_length(weights, count):
    seen = Counter(prompt.task for prompt in mixed_prompts(weights, count))
    total = sum(weights.values())
    for task in TASKS:
        assert abs(seen[task] - count * weights.get(task, 0) / total) < len(TASKS)
        if not weights.get(task):
            assert not seen[task]


def test_a_mix_of_nothing_is_refused():
    with pytest.raises(ValueError, match="weight"):
        mixed_prompts({"code": 0.0}, 3)

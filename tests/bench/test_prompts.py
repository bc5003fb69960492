from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_deploy.bench.prompts import TASKS, mixed_prompts, prompts_by_task


def test_every_task_has_a_dozen_different_questions_and_some_in_chinese():
    by_task = prompts_by_task()
    assert set(by_task) == set(TASKS)
    for prompts in by_task.values():
        assert len(set(prompts)) == len(prompts) >= 12
        assert any("\u4e00" <= prompt[0] <= "\u9fff" for prompt in prompts)


def test_the_order_is_always_the_same_and_a_longer_run_begins_like_a_shorter_one():
    mix = {"code": 0.5, "math": 0.5}
    assert mixed_prompts(mix, 40)[:10] == mixed_prompts(mix, 10)


@settings(deadline=None)
@given(
    weights=st.dictionaries(st.sampled_from(TASKS), st.floats(0, 10), min_size=1).filter(
        lambda mix: sum(mix.values()) > 0.01
    ),
    count=st.integers(1, 60),
)
def test_the_mix_keeps_to_its_weights_at_every_length(weights, count):
    task_of = {prompt: task for task, prompts in prompts_by_task().items() for prompt in prompts}
    seen = Counter(task_of[prompt] for prompt in mixed_prompts(weights, count))
    total = sum(weights.values())
    for task in TASKS:
        assert abs(seen[task] - count * weights.get(task, 0) / total) < len(TASKS)
        if not weights.get(task):
            assert not seen[task]


def test_a_mix_of_nothing_is_refused():
    with pytest.raises(ValueError, match="weight"):
        mixed_prompts({"code": 0.0}, 3)

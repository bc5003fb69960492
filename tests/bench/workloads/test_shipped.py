import json
from collections import Counter
from itertools import pairwise

import pytest

from dflash_deploy.bench.workloads import LANGUAGES, TASKS, load, load_all
from dflash_deploy.bench.workloads.shipped import long_context
from dflash_deploy.resources import resource_dir


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_many_different_prompts_in_both_languages(task):
    prompts = load(task)
    assert len({prompt.messages for prompt in prompts}) == len(prompts) >= 32
    languages = Counter(prompt.language for prompt in prompts)
    assert all(languages[language] >= 10 for language in LANGUAGES)
    assert all(prompt.task == task and prompt.messages[-1].role == "user" for prompt in prompts)


def test_ids_are_unique_and_files_and_tasks_are_the_same():
    assert len({prompt.id for prompt in load_all()}) == len(load_all())
    assert {path.stem for path in resource_dir("workloads").iterdir()} == set(TASKS)


def test_over_two_hundred_good_answers_hold_the_right_one():
    good = [prompt for prompt in load_all() if prompt.reference]
    assert len({prompt.reference for prompt in good}) == len(good) >= 200
    for prompt in good:
        assert prompt.answer is None or prompt.answer in prompt.reference, prompt.id


def test_the_language_is_that_of_the_text():
    for prompt in load_all():
        chinese = sum("\u4e00" <= char <= "\u9fff" for char in prompt.question)
        assert (chinese > 0) == (prompt.language == "zh-TW"), prompt.id
    # Characters that only the simplified script has.
    text = "".join(message.content for prompt in load_all() for message in prompt.messages)
    text += "".join(prompt.reference or "" for prompt in load_all())
    assert not set(text) & set("这个们说时间东车门问见长书学")


def test_json_answers_fit_their_schema_and_calls_their_parameters():
    for prompt in load("tools"):
        schema = prompt.schema or prompt.tool["parameters"]
        answer = json.loads(prompt.reference)
        assert set(answer) == set(schema["properties"]) == set(schema["required"]), prompt.id


def test_the_turns_of_a_conversation_share_all_that_came_before():
    prompts = load("multi-turn")
    follow = [(one, two) for one, two in pairwise(prompts) if len(two.messages) > 2]
    assert len(follow) >= 25
    for one, two in follow:
        assert two.messages[: len(one.messages)] == one.messages
        assert two.messages[len(one.messages)] == ("assistant", one.reference)


@pytest.mark.parametrize("chars", [2000, 8000, 40_000])
def test_a_needle_lies_once_in_a_document_of_the_wanted_length(chars):
    prompts = long_context(chars)
    beginnings = set()
    places = []
    for prompt in prompts:
        text = prompt.question
        assert chars * 0.9 < len(text) < chars * 1.1 + 1500
        assert text.count(prompt.answer) == 1, prompt.id
        places.append(text.index(prompt.answer) / len(text))
        beginnings.add(text[:40])
    assert len(beginnings) == len(prompts)
    assert min(places) < 0.2
    assert max(places) > 0.8


def test_salt_comes_first_and_changes_nothing_else():
    prompt = load("multi-turn")[3]
    salted = prompt.salted("x1")
    assert salted.messages[0].content == f"[x1] {prompt.messages[0].content}"
    assert salted.messages[1:] == prompt.messages[1:]

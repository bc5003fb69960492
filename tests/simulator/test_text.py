from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.simulator.text import Answer, count_tokens, task_of


@given(prompt=st.text(max_size=200), cuts=st.lists(st.integers(1, 9), min_size=1, max_size=40))
def test_an_answer_does_not_depend_on_how_it_is_cut(prompt: str, cuts: list[int]) -> None:
    pieces = Answer(prompt, 0)
    assert "".join(pieces.take(cut) for cut in cuts) == Answer(prompt, 0).take(sum(cuts))


def test_answers_differ_by_prompt_and_by_seed() -> None:
    assert Answer("a", 0).take(50) != Answer("b", 0).take(50)
    assert Answer("a", 0).take(50) != Answer("a", 1).take(50)


def test_a_good_answer_neither_loops_nor_breaks() -> None:
    words = Answer("Tell me about rivers.", 0).take(1024).split()
    triples = list(zip(words, words[1:], words[2:], strict=False))
    assert len(set(triples)) > 0.97 * len(triples)
    assert all(word.isprintable() and "\ufffd" not in word for word in words)


def test_broken_answers_look_broken() -> None:
    assert "\ufffd" in Answer("a", 0, "garbage").take(200)
    assert len(set(Answer("a", 0, "repeat").take(200).split())) == 2


def test_chinese_is_answered_in_chinese() -> None:
    answer = Answer("請說明快取是什麼以及為什麼需要它", 0).take(60)
    assert sum("\u4e00" <= ch <= "\u9fff" for ch in answer) > 0.7 * len(answer)


def test_tasks_are_told_apart() -> None:
    assert task_of("Write a Python function that sorts a list.") == "code"
    assert task_of("How many apples are left? Solve the equation.") == "math"
    assert task_of("Write a short story about a lighthouse.") == "prose"
    assert task_of("Explain the benefits of public transport.") == "instruction"


def test_tokens_grow_with_text() -> None:
    assert count_tokens("") == 0
    assert count_tokens("one two three.") == 4
    assert count_tokens("快取記憶") == 4
    assert count_tokens("word " * 1000) == 1000

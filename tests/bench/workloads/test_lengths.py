import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_deploy.bench.workloads import Prompt
from dflash_deploy.bench.workloads.lengths import ServerCounter, fit
from dflash_deploy.bench.workloads.prompt import ask
from tests.bench.sse_server import Script, serving


def counter(per_word: int, template: int):
    """Words of up to ``per_word`` letters are a token, longer ones more; signs are one each."""

    def count(prompt: Prompt) -> int:
        text = " ".join(message.content for message in prompt.messages)
        words = re.findall(r"\w+|[^\w\s]", text)
        return template + sum(-(-len(word) // per_word) for word in words)

    return count


@settings(max_examples=60)
@given(st.integers(1, 12), st.integers(0, 40), st.integers(100, 5000))
def test_a_prompt_gets_exactly_the_wanted_length(per_word, template, wanted):
    count = counter(per_word, template)
    fitted = fit(ask("Why is that?"), wanted, count, salt="s-1")
    assert fitted is not None
    assert fitted.tokens == wanted == count(fitted.prompt)
    assert fitted.prompt.messages[0].content.startswith("[s-1] ")
    assert "Why is that?" in fitted.prompt.question


def test_few_questions_are_asked():
    asked = []
    count = counter(5, 9)
    fit(ask("Why?"), 100_000, lambda prompt: asked.append(1) or count(prompt))
    assert len(asked) < 16


def test_what_cannot_be_fitted():
    assert fit(ask("a b c d"), 3, counter(9, 0)) is None
    assert fit(ask("a"), 100, lambda _: None) is None


def test_a_server_without_a_tokenizer_is_asked_for_one_token():
    with serving(Script(body=b'{"usage": {"prompt_tokens": 41}}')) as (url, seen):
        count = ServerCounter(url, "m", api_key="k")
        assert (count(ask("a")), count(ask("b"))) == (41, 41)
        assert count.by_asking
    assert [body.get("max_tokens") for body in seen.bodies] == [None, 1, 1]
    assert all(b"authorization: bearer k" in head for head in seen.heads)


def test_a_server_that_tokenizes_does_nothing_else():
    with serving(Script(body=b'{"tokens": [1, 2], "count": 2}')) as (url, seen):
        assert ServerCounter(url, "m", api_key=None)(ask("a")) == 2
    assert b"post /tokenize" in seen.heads[0]


def test_extras_are_left_out_for_who_refuses_them():
    with serving(Script(body=b'{"usage": {"prompt_tokens": 41}}')) as (url, seen):
        assert ServerCounter(url, "m", api_key=None, extras=False)(ask("a")) == 41
    assert all(body.keys() <= {"model", "messages", "max_tokens"} for body in seen.bodies)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"count": "two"}', b'{"usage": {}}', b"\xff", b"[" * 100_000])
def test_nonsense_counts_nothing(body):
    with serving(Script(body=body)) as (url, _):
        assert ServerCounter(url, "m", api_key=None)(ask("a")) is None

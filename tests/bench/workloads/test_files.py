import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_deploy.bench.workloads import files
from dflash_deploy.errors import DeployError


def write(tmp_path, text):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_json_lines_with_prompts_or_messages(tmp_path):
    lines = [
        {"prompt": "One?", "answer": "1", "max_tokens": 5, "task": "math", "language": "en"},
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Two?"}]}],
            "system": "Be brief.",
        },
    ]
    path = write(tmp_path, "\n\n".join(json.dumps(line) for line in lines))
    one, two = files.read(path)
    assert (one.question, one.answer, one.output_tokens, one.task) == ("One?", "1", 5, "math")
    assert two.messages == (("system", "Be brief."), ("user", "Two?"))
    assert (one.id, two.id) == ("mine.jsonl:1", "mine.jsonl:3")


def test_openai_batch(tmp_path):
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 9}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (prompt,) = files.read(write(tmp_path, json.dumps(line)))
    assert (prompt.question, prompt.output_tokens) == ("Hi", 9)


def test_sharegpt_asks_the_last_human_turn_and_keeps_the_answer(tmp_path):
    talk = [
        {"from": "human", "value": "A"},
        {"from": "gpt", "value": "B"},
        {"from": "human", "value": "C"},
        {"from": "gpt", "value": "D"},
    ]
    text = json.dumps([{"id": "x", "conversations": talk}, {"id": "y", "conversations": talk[:2]}], indent=1)
    one, two = files.read(write(tmp_path, text))
    assert [message.content for message in one.messages] == ["A", "B", "C"]
    assert (one.reference, two.reference) == ("D", "B")
    assert two.question == "A"


def test_conversations_in_which_nobody_asks_are_passed_over(tmp_path):
    talks = [
        {"conversations": []},
        {"conversations": [{"from": "gpt", "value": "A"}]},
        {"conversations": [{"from": "human", "value": "B"}, {"from": "bing", "value": "C"}]},
    ]
    (prompt,) = files.read(write(tmp_path, json.dumps(talks)))
    assert (prompt.question, prompt.reference) == ("B", "C")


def test_a_batch_of_plain_completions_is_asked_as_chat(tmp_path):
    line = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "A", "max_tokens": 5}}
    (prompt,) = files.read(write(tmp_path, json.dumps(line)))
    assert (prompt.question, prompt.output_tokens) == ("A", 5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"prompt": "a"}\n{"prompt": 7}\n{oops\n', [":2: prompt: expected text", ":3: not JSON"]),
        ('{"question": "a"}', [":1: expected prompt, messages, conversations or body"]),
        ('{"messages": [{"role": "robot", "content": "a"}]}', ["message 1: unknown role 'robot'"]),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', ["ends with the user's turn"]),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', ["only text is taken"]),
        ('{"prompt": "a", "max_tokens": 0}', ["max_tokens"]),
        ('{"prompt": "a", "answer": 7}', ["answer: expected text"]),
        ('[\n{"conversations": {}}\n]', [":2: expected a list of 1"]),
        ('[{"conversations": []}, {"conversations": [{"from": "gpt", "value": "a"}]}]', ["holds no prompt"]),
        ('{"body": {"max_tokens": 5}}', ["expected prompt, messages"]),
        ('[\n{"prompt": "a"},\n{"prompt": ', [":3: not JSON"]),
        ('[{"prompt": "a"}', ["the list does not end"]),
        ('["a"]', ["expected an object"]),
        ("", ["holds no prompt"]),
        (b'{"prompt": "a"}\n\xff', [":2: expected UTF-8"]),
        ("[" * 100_000, ["nested too deeply"]),
    ],
)
def test_mistakes_are_told_with_their_lines(tmp_path, text, expected):
    path = write(tmp_path, text)
    with pytest.raises(DeployError) as caught:
        files.read(path)
    for words in expected:
        assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_sizes_and_counts_are_bounded(tmp_path, monkeypatch):
    path = write(tmp_path, '{"prompt": "a long one"}\n' * 5)
    monkeypatch.setattr(files, "MAX_PROMPTS", 3)
    with pytest.raises(DeployError, match="more than 3 prompts"):
        files.read(path)
    monkeypatch.setattr(files, "MAX_PROMPT_CHARS", 4)
    with pytest.raises(DeployError, match="longer than"):
        files.read(path)
    monkeypatch.setattr(files, "MAX_BYTES", 20)
    with pytest.raises(DeployError, match="cannot be read"):
        files.read(path)


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "none", tmp_path / "pipe", tmp_path):
        with pytest.raises(DeployError):
            files.read(path)


entries = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "prompt",
                    "messages",
                    "role",
                    "content",
                    "from",
                    "value",
                    "conversations",
                    "body",
                    "max_tokens",
                ]
            )
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=60)
@given(st.lists(entries, max_size=5), st.booleans())
def test_any_json_is_read_or_refused(tmp_path_factory, values, as_list):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_text(json.dumps(values) if as_list else "\n".join(map(json.dumps, values)))
    try:
        prompts = files.read(path)
    except DeployError:
        return
    assert all(prompt.messages[-1].role == "user" for prompt in prompts)

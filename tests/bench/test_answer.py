"""What is read of a stream, piece by piece."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.bench.answer import Answer
from dflash_deploy.bench.measurement import Quantiles, percentile
from dflash_deploy.bench.transport import Failure

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def event(delta, **more):
    return {
        "id": "1",
        "choices": [{"index": 0, "delta": delta, "finish_reason": None}],
        "usage": None,
        **more,
    }


def piece(content, ascii_only=True, separators=None):
    text = json.dumps(content, ensure_ascii=ascii_only, separators=separators)
    return b"data: " + text.encode(errors="surrogatepass") + b"\n\n"


def came_to(pieces, *, remembering=True):
    """What an answer holds after these pieces, or how it failed."""
    answer = Answer()
    if not remembering:
        answer._forms_left = 0
    try:
        for place, one in enumerate(pieces):
            answer.take(one, float(place))
    except Failure as failure:
        return failure.kind, failure.reason
    return (
        answer.pieces,
        answer.at_s,
        answer.calls,
        answer.finish_reason,
        answer.output_tokens,
        answer.done,
    )


TEXTS = st.text(max_size=6) | st.sampled_from(
    ["content", "stop", '":"', '"', "\\", "\x7fprobe\x7f", "id", "1", " word", "詞", "\ud800", "\u2028", "}"]
)
DELTAS = st.builds(lambda text: {"content": text}, TEXTS) | st.dictionaries(
    st.sampled_from(["content", "reasoning_content", "reasoning", "tool_calls", "role"]),
    TEXTS | st.none() | st.just([{"index": 0, "function": {"name": "f", "arguments": "{"}}]),
    max_size=3,
)
EVENTS = st.builds(
    event,
    DELTAS,
    usage=st.none() | st.just({"completion_tokens": 3}) | st.just({"completion_tokens": 7}),
    id=st.sampled_from(["1", "content", "\x7fprobe\x7f", " word"]),
)
PIECES = st.builds(piece, EVENTS, st.booleans(), st.sampled_from([None, (",", ":")])) | st.sampled_from(
    [
        b": comment\n\n",
        b"data: ",
        b"\n",
        b"data: [DONE]\n\n",
        b'data: {"choices":[{"delta":{"content":"a","content":"b"}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"c"}}]}\r\n\r\n',
        b'data: {"choices":[{"delta":{"content":"c"}}],"x":NaN}\n\n',
    ]
)


@given(st.lists(PIECES, max_size=12))
def test_a_form_that_is_known_reads_as_the_parser_does(pieces):
    assert came_to(pieces) == came_to(pieces, remembering=False)


def test_a_form_is_known_after_one_event_and_forgotten_when_another_comes():
    words = [piece(event({"content": word})) for word in ("one", " two", " three")]
    answer = Answer()
    answer.take(words[0], 0.0)
    assert answer._form is not None
    # Were it parsed, this would fail: the reader is told nothing.
    answer._reader = None
    assert not answer.take(words[1], 1.0)
    assert answer.pieces == ["one", " two"]


@pytest.mark.parametrize("key", ["content", "reasoning_content", "reasoning"])
def test_thoughts_have_a_form_as_well(key):
    answer = Answer()
    answer.take(piece(event({key: "Hm."})), 0.0)
    assert answer._form is not None


def test_events_that_never_repeat_are_not_learnt_for_ever():
    answer = Answer()
    for place in range(50):
        answer.take(piece(event({"content": "word"}, id=str(place))), 0.0)
    assert answer._forms_left == 0
    assert len(answer.pieces) == 50


@given(JSON)
def test_any_event_is_taken_or_refused_in_words(content):
    answer = Answer()
    for told in (content, event(content), {"choices": [content], "usage": content, "sglext": content}):
        try:
            answer.take(piece(told), 0.0)
        except Failure as failure:
            assert failure.reason


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "completion_tokens": JSON | st.integers(0, 10**500),
            "prompt_tokens": JSON | st.just(10**30),
            "prompt_tokens_details": JSON | st.just({"cached_tokens": 10**30}),
        },
    ),
    st.fixed_dictionaries(
        {},
        optional={
            name: st.integers(0, 10**400) | st.floats()
            for name in ("arrived_s", "first_token_s", "finished_s")
        },
    ),
)
def test_no_claim_of_a_server_is_more_than_a_figure(usage, times):
    answer = Answer()
    answer.take(piece(event({"content": "a"})), 0.0)
    answer.take(piece(event({"content": "b"})), 1.0)
    try:
        answer.take(piece({"choices": [], "usage": usage, "simulated": times}), 2.0)
    except Failure as failure:
        assert failure.kind == "broken"  # a number longer than Python reads
    for number in (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens):
        assert number is None or 0 <= number < 1 << 31
    if answer.times is not None:
        assert answer.times.sent_s <= answer.times.first_s <= answer.times.last_s
        assert answer.times.sent_s < answer.times.last_s


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5)), min_size=1, max_size=20))
def test_counted_figures_are_those_of_the_values_written_out(pairs):
    found = Quantiles.of_counted(pairs)
    every = sorted(value for value, count in pairs for _ in range(count))
    expected = [percentile(every, share) for share in (0.5, 0.95, 0.99)]
    assert [found.median, found.p95, found.p99] == pytest.approx(expected)
    assert (found.low, found.high) == (every[0], every[-1])


def test_a_billion_tokens_take_no_more_room_than_one():
    found = Quantiles.of_counted([(0.5, 2_000_000_000), (1.0, 10)])
    assert (found.median, found.p99, found.high) == (0.5, 0.5, 1.0)
    assert Quantiles.of_counted([]) is None


@pytest.mark.parametrize("levels", [900, 960, 980, 990, 1000, 2000, 100_000])
def test_events_nested_however_deeply_raise_nothing_else(levels):
    deep = "[" * levels + "]" * levels
    for text in (
        f'{{"choices":[{{"delta":{{"content":"a"}},"x":{deep}}}]}}',
        f'{{"error":{deep.replace("[", "[1,", 1)}}}',
    ):
        try:
            Answer().take(b"data: " + text.encode() + b"\n\n", 0.0)
        except Failure as failure:
            assert failure.kind in {"broken", "server"}


def test_what_follows_the_end_is_no_part_of_the_answer():
    answer = Answer()
    last = piece(event({"content": "a"})) + b"data:  [DONE] \n\n"
    assert answer.take(last + piece({"choices": [], "usage": {"completion_tokens": 9}}) + b"data: x\n\n", 0.0)
    assert (answer.pieces, answer.output_tokens) == (["a"], None)

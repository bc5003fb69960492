import asyncio
import gc
import json
import math
import random
import socket
import ssl
import statistics
import threading
import time
from contextlib import ExitStack, suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_deploy.bench.chat import Sampling, _shared_out
from dflash_deploy.bench.endpoint import Endpoint
from dflash_deploy.bench.load import Load, Player, poisson
from dflash_deploy.bench.measurement import LoadFigures, Round, ToolCall
from dflash_deploy.bench.transport import Address, Exchange, Patience
from dflash_deploy.bench.workloads.lengths import ServerCounter
from dflash_deploy.bench.workloads.prompt import ask

from .sse_server import Script, serving


def player(url, *, stall_s=30.0, total_s=60.0, **given):
    return Player(
        Load(Endpoint(url), [ask("One?"), ask("Two?")], Sampling(9), Patience(stall_s, total_s), **given)
    )


def one(url, **given):
    (result,) = asyncio.run(player(url, **given).closed(1, requests=1))
    return result


def delta(**parts):
    return {"choices": [{"index": 0, "delta": parts}]}


def test_users_ask_again_as_soon_as_they_are_answered():
    with serving(Script(wait_s=0.02, together=3)) as (url, seen):
        results = asyncio.run(player(url).closed(3, requests=10))
    assert len(results) == 10
    assert {result.user for result in results} == {0, 1, 2}
    assert seen.most == 3
    prompts = [body["messages"][0]["content"] for body in seen.bodies]
    assert len(set(prompts)) == 10
    figures = LoadFigures.of(results)
    assert (figures.requests, figures.output_tokens, figures.errors) == (10, 90, {})
    assert figures.total_tokens_per_s == pytest.approx(90 / figures.wall_s)
    assert figures.inter_token_s.low > 0


def test_a_closed_loop_may_end_by_the_clock():
    with serving(Script(wait_s=0.02)) as (url, _):
        results = asyncio.run(player(url).closed(2, duration_s=0.4))
    assert len(results) >= 2
    with pytest.raises(ValueError, match="one of them"):
        asyncio.run(player("http://127.0.0.1:1").closed(1))


def test_an_open_loop_does_not_wait_for_answers():
    moments = [0.0, 0.05, 0.1, 0.15]
    with serving(Script(wait_s=0.01, together=4)) as (url, seen):
        begun = time.perf_counter()
        results = asyncio.run(player(url).open(moments))
    assert seen.most == 4
    for due, result in zip(moments, results, strict=True):
        assert result.sent_s - begun >= due, "none comes early"
        assert result.waited_s >= 0


def test_an_open_loop_ends_when_nothing_is_answered():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    moments = [0.001 * number for number in range(40)] + [3600.0]
    results = asyncio.run(player(f"http://127.0.0.1:{port}").open(moments))
    assert 20 <= len(results) <= 40
    assert {result.error_kind for result in results} == {"unreachable"}


def test_arrivals_come_at_the_rate_and_a_seed_gives_the_same_ones():
    moments = poisson(5.0, 4000, seed=3)
    assert moments == poisson(5.0, 4000, seed=3) != poisson(5.0, 4000, seed=4)
    waits = [later - earlier for earlier, later in pairwise(moments)]
    assert statistics.mean(waits) == pytest.approx(0.2, rel=0.1)
    # Exponential waits: as much spread as mean, and one in e of them longer than it.
    assert statistics.stdev(waits) == pytest.approx(0.2, rel=0.1)
    assert sum(wait > 0.2 for wait in waits) / len(waits) == pytest.approx(math.exp(-1), abs=0.04)
    with pytest.raises(ValueError, match="above zero"):
        poisson(0, 1)


def test_tokens_of_a_chunk_share_the_wait_for_it():
    usage = {"completion_tokens": 90}
    with serving(Script(pieces=("a", "b" * 88, "c"), wait_s=0.2, usage=usage)) as (url, _):
        result = one(url)
    assert sum(result.chunk_tokens) == 90
    assert result.chunk_tokens[1] > result.chunk_tokens[2] >= 1
    waits = list(result.token_waits)
    assert sum(tokens for _, tokens in waits) == sum(result.chunk_tokens[1:])
    assert sum(wait * tokens for wait, tokens in waits) == pytest.approx(result.decode_s)
    assert min(waits)[0] < max(waits)[0] / 2


@given(st.integers(0, 500), st.lists(st.integers(1, 50), max_size=40))
def test_every_chunk_has_a_token_and_none_is_lost(tokens, lengths):
    shares = _shared_out(tokens, lengths)
    assert all(share >= 1 for share in shares)
    if lengths:
        assert sum(shares) == max(tokens, len(lengths))


def test_thoughts_that_come_at_once_have_the_tokens_that_their_length_says():
    words = [f"a{number:02d} " for number in range(16)]
    shares = _shared_out(116, [500, *map(len, words)])
    assert shares == (100, *[1] * 16)


@pytest.mark.parametrize(
    ("usage", "first", "hidden"),
    [
        ({"completion_tokens_details": {"reasoning_tokens": 40}}, {"content": "So: "}, 40),
        ({"reasoning_tokens": 40}, {"content": "So: "}, 40),
        # Shown, in a field of their own or in the text.
        ({"reasoning_tokens": 40}, {"reasoning": "Hm. "}, 0),
        ({"reasoning_tokens": 40}, {"content": "Hm.</think> "}, 0),
        ({"reasoning_tokens": None}, {"content": "So: "}, 0),
        ({"reasoning_tokens": 10**9}, {"content": "So: "}, 42),
    ],
)
def test_thoughts_are_hidden_where_they_are_counted_and_not_shown(usage, first, hidden):
    events = (delta(**first), delta(content="four."))
    told = {"prompt_tokens": 7, "completion_tokens": 44, **usage}
    with serving(Script(events=events, wait_s=0.01, usage=told)) as (url, _):
        result = one(url)
    assert (result.output_tokens, result.hidden_tokens) == (44, hidden)
    assert sum(result.chunk_tokens) == 44 - hidden


def test_thoughts_and_calls_count_as_well_as_text():
    call = {"index": 0, "function": {"name": "add", "arguments": '{"a"'}}
    events = (
        delta(reasoning_content="Let me see. "),
        delta(reasoning="More. "),
        delta(content="Yes.", reasoning_content=None),
        delta(tool_calls=[call]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}, "nonsense"]),
        {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]},
    )
    with serving(Script(events=events, wait_s=0.01)) as (url, _):
        result = one(url)
    assert result.error is None
    assert result.chunks == 5
    assert result.text.startswith("Let me see. More. Yes.")
    assert result.tool_calls == (ToolCall("add", '{"a": 1}'),)
    assert result.finish_reason == "tool_calls"


def test_texts_in_parts_are_texts():
    thought = [{"type": "thinking", "thinking": [{"type": "text", "text": "Let me see. "}]}]
    events = (
        delta(content=thought),
        delta(content=[{"type": "text", "text": "Yes, "}, {"type": "text", "text": "it is."}]),
        delta(content=[{"type": "image_url"}, "nonsense", 7]),
    )
    with serving(Script(events=events, wait_s=0.01)) as (url, _):
        result = one(url)
    assert result.error is None
    assert result.text.startswith("Let me see. Yes, it is.")


def test_what_the_server_says_of_an_answer_is_kept():
    usage = {
        "prompt_tokens": 7,
        "completion_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    spec = {"spec_accept_length": 3.0, "spec_accept_rate": 0.4, "spec_verify_ct": 3}
    events = (
        delta(content="a"),
        delta(content="b"),
        {"choices": [], "sglext": {"spec_tokens_details": spec}},
    )
    with serving(Script(events=events, wait_s=0.01, usage=usage)) as (url, _):
        result = one(url)
    assert (result.cached_tokens, result.verify_steps) == (4, 3)
    assert (result.accept_length, result.accept_rate) == (3.0, 0.4)
    figures = LoadFigures.of([result])
    assert (figures.accept_length, figures.cached_tokens) == (3.0, 4)
    assert figures.accept_rate == pytest.approx(0.4)


def test_a_server_that_does_not_count_is_refused_or_marked():
    with serving(Script(usage=None, wait_s=0.01)) as (url, _):
        refused, estimated = one(url), one(url, estimate_tokens=True)
    assert refused.error_kind == "uncounted"
    assert estimated.error is None
    assert estimated.tokens_estimated
    assert estimated.output_tokens == 4
    assert LoadFigures.of([estimated]).tokens_estimated


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (Script(cut_after=2, wait_s=0.01), "cut"),
        (Script(half_close_after=2, wait_s=0.01), "cut"),
        (Script(stall_after=2, wait_s=0.01), "stalled"),
        (Script(done=False), "cut"),
        (Script(raw=b"data: {nonsense\n\n"), "broken"),
        (Script(raw=b'data: {"error": {"message": "no memory"}}\n\n'), "server"),
        (Script(raw=b'data: {"choices": [{"delta": {}}], "error": {"message": "no memory"}}\n\n'), "server"),
        (Script(raw=b'data: {"object": "error", "message": "no memory"}\n\n'), "server"),
        (Script(raw=b'error: {"code": 500, "message": "no memory"}\n\n'), "server"),
        (Script(events=(delta(content="a"), {"choices": [{"finish_reason": "abort"}]})), "server"),
        (Script(status="429 Too Many Requests", body=b"slow down"), "busy"),
        (Script(status="503 Service Unavailable", body=b"loading"), "busy"),
        (Script(status="401 Unauthorized", body=b"key"), "denied"),
        (Script(status="404 Not Found", body=b"model"), "absent"),
        (Script(status="400 Bad Request", body=b"no"), "refused"),
        (Script(status="500 Internal Server Error", body=b""), "http"),
        (Script(status="307 Temporary Redirect", body=b""), "redirected"),
    ],
)
def test_every_failure_has_a_kind_and_a_time(script, kind):
    with serving(script) as (url, _):
        result = one(url, stall_s=0.5)
    assert result.error_kind == kind, result.error
    assert result.error
    assert 0 <= result.total_s < 30
    figures = LoadFigures.of([result])
    assert figures.errors == {kind: 1}
    assert figures.first_error == result.error
    assert figures.ttft_s is None


def test_an_answer_is_over_with_its_last_event_whatever_the_connection_does():
    with serving(Script(wait_s=0.01, open_end=True)) as (url, _):
        assert one(url, stall_s=20).error is None


def test_one_failure_does_not_end_the_others():
    def answer(number):
        if number % 3 == 1:
            raise ConnectionError
        return ("a ", "b ", "c")

    with serving(Script(answer_of=answer, wait_s=0.01)) as (url, _):
        results = asyncio.run(player(url).closed(2, requests=9))
    figures = LoadFigures.of(results)
    assert (figures.requests, figures.errors) == (9, {"cut": 3})
    assert figures.output_tokens == 6 * 9


def speaks(answer: bytes):
    """A server that says this to whoever comes, and closes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}", thread


EVENTS = b"".join(
    b"data: %s\n\n" % data
    for data in (
        b'{"choices":[{"delta":{"content":"a"}}]}',
        b'{"choices":[],"usage":{"completion_tokens":2}}',
    )
)


FINISHED = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", "cut"),
        (b"SSH-2.0-OpenSSH\r\n", "broken"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000, "broken"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "broken"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\ndata:", "cut"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 100\r\n\r\nwai", "busy"),
        # Not chunked: the end of the connection is the end of the answer; a hint comes before the answer.
        (b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\n\r\n" + EVENTS + b"data: [DONE]\n\n", None),
        (b"HTTP/1.0 200 OK\r\n\r\n" + EVENTS, "cut"),
        # Whoever says why it ended need not say that it did.
        (b"HTTP/1.0 200 OK\r\n\r\n" + EVENTS + FINISHED, None),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n\0", "broken"),
        (b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\n\r\n<!doctype html>" + b"x" * 9000, "no-stream"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "no-stream"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", "no-stream"),
        (SSE + b"content-encoding: gzip\r\n\r\n\x1f\x8b", "broken"),
        (SSE + b"\r\ndata: \xff\n\n", "broken"),
        (b"HTTP/1.1 429 Slow\r\nretry-after: 7\r\ncontent-length: 0\r\n\r\n", "busy"),
    ],
)
def test_any_first_words_of_a_server(answer, kind):
    url, thread = speaks(answer)
    result = one(url)
    thread.join(10)
    assert result.error_kind == kind, result.error


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 429 Slow\r\nretry-after: 7\r\ncontent-length: 0\r\n\r\n", "HTTP 429 (retry-after: 7)"),
        (
            b"HTTP/1.1 308 There\r\nlocation: https://there/v1\r\ncontent-length: 0\r\n\r\n",
            "HTTP 308 (location: https://there/v1)",
        ),
        (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\n\r\n<title>Open WebUI</title>",
            "no stream of events came, but text/html: <title>Open WebUI</title>",
        ),
    ],
)
def test_what_a_server_hints_at_is_passed_on(answer, words):
    url, thread = speaks(answer)
    assert one(url).error == words
    thread.join(10)


def test_a_server_that_fails_every_time_is_not_asked_for_ever():
    with serving(Script(status="404 Not Found", body=b"model")) as (url, seen):
        results = asyncio.run(player(url).closed(4, duration_s=600.0))
    assert 20 <= len(results) < 30
    assert len(seen.bodies) == len(results)


def test_what_an_address_by_tls_is_missing_is_said(tmp_path):
    url, thread = speaks(b"HTTP/1.1 200 OK\r\n\r\n")
    result = one(url.replace("http:", "https:"))
    assert (result.error_kind, result.error) == ("untrusted", "no connection by TLS: WRONG_VERSION_NUMBER")
    thread.join(10)


def test_a_stream_by_tls_comes_whole_and_only_from_whom_one_trusts(certificate, monkeypatch):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    script = Script(pieces=tuple(f"word{number} " for number in range(200)), usage={"completion_tokens": 200})
    script.tokenizes = True
    with serving(script, tls=context) as (url, _):
        refused = one(url)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        result = one(url)
        counted = ServerCounter(url, "m", api_key=None)(ask("one two three"))
    assert refused.error_kind == "untrusted"
    assert "certificate" in refused.error
    assert result.error is None
    assert result.text == "".join(script.pieces)
    assert counted == 3


def test_a_loop_that_reads_whatever_was_paused_while_the_connection_was_made(monkeypatch):
    """As that of Python 3.11.2 does, which Debian 12 has."""

    def begin(self, fd, callback, *arguments):
        if not self.is_closing():
            self._loop._add_reader(fd, callback, *arguments)

    monkeypatch.setattr("asyncio.selector_events._SelectorTransport._add_reader", begin)
    with serving(Script()) as (url, _):
        result = one(url)
    assert (result.error, result.text) == (None, "one two three four five")


def test_ctrl_c_while_the_parser_calls_is_not_taken_for_nonsense():
    def interrupt(piece, now):
        raise KeyboardInterrupt

    loop = asyncio.new_event_loop()
    try:
        exchange = Exchange(loop, interrupt)
        with pytest.raises(KeyboardInterrupt):
            exchange.received(SSE + b"\r\ndata: x\n\n")
    finally:
        loop.close()


@settings(max_examples=30)
@given(st.binary(max_size=300), st.randoms(use_true_random=False))
def test_noise_never_hangs_nor_raises(noise, generator: random.Random):
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    url, thread = speaks(generator.choice([b"", head, head + b"10\r\ndata: "]) + noise)
    assert one(url).error_kind is not None
    thread.join(10)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:1",
        "ftp://a",
        "http://a:99999",
        "http://[::1",
        "http://u:p@a",
        "http://a/?b",
        "http://a b",
    ],
)
def test_what_is_no_address(url):
    with pytest.raises(ValueError, match="address"):
        Address.parse(url)


def test_addresses_keep_their_root_and_the_usual_ports():
    assert Address.parse("https://example.org/api/") == Address("example.org", 443, True, "/api")
    assert Address.parse("http://[::1]:8000") == Address("::1", 8000, False, "")
    assert b"host: [::1]:8000\r\n" in Address.parse("http://[::1]:8000").post("/x", b"", {})


def test_collections_are_on_again_afterwards():
    with serving(Script(wait_s=0.01)) as (url, _):
        one(url)
    assert gc.isenabled()


async def answer_one(reader, writer):
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        told = [delta(content="Yes."), {"choices": [], "usage": {"completion_tokens": 2}}]
        for event in (*map(json.dumps, told), "[DONE]"):
            writer.write(f"data: {event}\n\n".encode())
        await writer.drain()
    writer.close()


@pytest.mark.parametrize(
    "ask_in",
    [
        lambda one: one.round(1, "r", 0),
        lambda one: one.closed(1, requests=1),
        lambda one: one.open([0.0]),
    ],
)
def test_waiting_for_a_server_that_takes_no_more_connections_is_waiting_for_its_answer(ask_in):
    async def ask_while_full():
        with socket.create_server(("127.0.0.1", 0), backlog=0) as taken, ExitStack() as others:
            for _ in range(3):
                other = others.enter_context(socket.socket())
                other.setblocking(False)
                other.connect_ex(taken.getsockname())
            one = player(f"http://127.0.0.1:{taken.getsockname()[1]}")
            asked = asyncio.create_task(ask_in(one))
            await asyncio.sleep(0.3)
            # From now on it takes whoever asks, and TCP asks again after a second.
            async with await asyncio.start_server(answer_one, sock=taken):
                return await asked

    played = asyncio.run(ask_while_full())
    (result,) = played.requests if isinstance(played, Round) else played
    assert result.error is None
    assert result.total_s >= result.ttft_s > 0.25
    assert result.waited_s < result.ttft_s

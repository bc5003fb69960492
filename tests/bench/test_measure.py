import json
import socket

import pytest

from dflash_deploy.bench.measure import measure
from dflash_deploy.bench.measurement import Measurement, NotMeasured
from dflash_deploy.bench.workloads.prompt import ask

from .sse_server import Script, serving

PROMPTS = ("first question", "second question", "third question")


def run(url, **given):
    settings = {
        "users": 1,
        "prompts": [ask(question) for question in PROMPTS],
        "output_tokens": 9,
        "rounds": 2,
        "warm_up": 1,
        "timeout_s": 60,
        "check_output": False,
    }
    return measure(url, **(settings | given))


def test_figures_follow_the_schedule_and_tokens_come_from_usage():
    # Nine tokens in four chunks: 0.4 s to the first, then 0.6 s to the last, which a busy machine delays.
    with serving(Script(first_wait_s=0.4, wait_s=0.2)) as (url, _):
        result = run(url)
    assert isinstance(result, Measurement)
    assert result.ttft_s.low >= 0.4
    assert result.latency_s.low >= 1.0
    for one in result.per_round:
        # After the first chunk there come three more, but more than five tokens.
        assert 5 < one.user_tokens_per_s * (one.latency_s - one.ttft_s) < 18
    assert result.total_tokens_per_s.high <= 9 / 1.0
    assert result.output_tokens == 18
    assert not result.faults
    assert len(result.per_round) == 2


def test_times_are_given_in_the_servers_own_time():
    with serving(Script(first_wait_s=0.1, wait_s=0.02)) as (url, _):
        result = run(url, time_scale=50)
    assert result.ttft_s.low >= 5
    assert result.latency_s.low >= 8


TOLD = {"arrived_s": 100.0, "first_token_s": 100.5, "finished_s": 102.5}


def test_a_simulated_server_tells_its_own_times():
    with serving(Script(simulated=TOLD)) as (url, _):
        result = run(url, time_scale=50)
    assert result.ttft_s.median == 0.5
    assert result.user_tokens_per_s.median == 8 / 2.0
    assert result.latency_s.median == 2.5
    assert result.total_tokens_per_s.median == 9 / 2.5


@pytest.mark.parametrize(
    "told",
    [
        "soon",
        {"arrived_s": 1.0},
        {"arrived_s": 3.0, "first_token_s": 2.0, "finished_s": 1.0},
        {"arrived_s": 0.0, "first_token_s": 1.0, "finished_s": float("inf")},
        {"arrived_s": [], "first_token_s": 1.0, "finished_s": 2.0},
    ],
)
def test_times_that_make_no_sense_are_not_believed(told):
    with serving(Script(first_wait_s=0.1, wait_s=0.05, simulated=told)) as (url, _):
        result = run(url, time_scale=50)
    assert result.ttft_s.low >= 5


def test_a_round_has_one_clock():
    # Four requests in two rounds; the server tells of three, so the second round is timed from here alone.
    script = Script(first_wait_s=0.1, wait_s=0.05, simulated=TOLD, simulated_for=frozenset({0, 1, 2, 3, 4}))
    with serving(script) as (url, _):
        result = run(url, users=2, time_scale=50)
    first, second = result.per_round
    assert first.total_tokens_per_s == 18 / 2.5
    # By two clocks it would last for hours.
    assert 18 / 100 < second.total_tokens_per_s * second.latency_s < 18.1
    assert second.ttft_s >= 5


def test_a_fast_server_is_told_which_requests_come_at_once():
    with serving(Script(wait_s=0.05)) as (url, seen):
        run(url, users=2, time_scale=50)
        run(url, users=2)
    lines = [line for head in seen.heads for line in head.split(b"\r\n") if line.startswith(b"x-simulated")]
    assert len(seen.heads) == 12
    assert len(lines) == 6
    assert all(line.endswith(b"/2") for line in lines)
    assert [lines.count(line) for line in lines] == [2] * 6


def test_a_server_in_real_time_is_timed_by_our_clock():
    with serving(Script(first_wait_s=0.1, wait_s=0.05, simulated=TOLD)) as (url, _):
        result = run(url)
    assert result.ttft_s.low >= 0.1
    assert result.latency_s.median != 2.5


def test_all_users_are_served_at_once_and_warm_up_is_left_out():
    with serving(Script(wait_s=0.05, together=4)) as (url, seen):
        result = run(url, users=4, rounds=3, warm_up=2)
    assert seen.most == 4
    assert len(seen.bodies) == 4 * 5
    assert result.output_tokens == 4 * 3 * 9
    assert result.users == 4


def test_requests_are_greedy_without_thinking_and_each_has_a_salt_of_its_own():
    with serving(Script(wait_s=0.05)) as (url, seen):
        run(url, users=2, ignore_eos=False, model="m")
    prompts = [body["messages"][0]["content"] for body in seen.bodies]
    assert len(set(prompts)) == len(prompts)
    assert len({prompt[:14] for prompt in prompts}) == len(prompts)
    for body in seen.bodies:
        assert body["temperature"] == 0
        assert body["stream"] is True
        assert body["stream_options"] == {"include_usage": True}
        assert body["chat_template_kwargs"] == {"enable_thinking": False}
        assert body["ignore_eos"] is False
        assert body["max_tokens"] == 9
        assert body["model"] == "m"


def test_without_salt_the_questions_are_asked_as_they_are():
    with serving(Script(wait_s=0.05)) as (url, seen):
        run(url, salt=None, rounds=3)
    assert [body["messages"][0]["content"] for body in seen.bodies] == [PROMPTS[0], *PROMPTS]


def test_the_same_salt_asks_the_same_questions_again():
    asked = []
    for _ in range(2):
        with serving(Script(wait_s=0.05)) as (url, seen):
            run(url, salt="s7")
        asked.append([body["messages"] for body in seen.bodies])
    assert asked[0] == asked[1]


def test_the_highest_vram_reading_is_kept_and_missing_ones_are_passed_over():
    readings = iter([None, 900, 1200, 1000])
    with serving(Script(first_wait_s=0.3, wait_s=0.05)) as (url, _):
        result = run(url, rounds=3, vram=lambda: next(readings, None), vram_total_mib=2000)
    assert result.vram_used_mib == 1200
    assert result.vram_total_mib == 2000


def test_accept_length_is_asked_once_after_the_load():
    asked = []
    with serving(Script(wait_s=0.05)) as (url, seen):
        result = run(url, accept_length=lambda: asked.append(len(seen.bodies)) or 3.5)
    assert result.accept_length == 3.5
    assert asked == [3]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (Script(cut_after=2), "stream cut"),
        (Script(done=False), "without [DONE]"),
        (Script(usage=None), "no usage"),
        (Script(usage={"completion_tokens": "many"}), "no usage"),
        (Script(usage={"completion_tokens": -4}), "no usage"),
        (Script(raw=b"data: {not json\n\n"), "broken JSON"),
        (Script(raw=b"data: [1, 2]\n\n"), "no object"),
        (Script(raw=b"data: \xff\xfe\n\n"), "broken JSON"),
        (Script(raw=b"data: " + b"[" * 200_000 + b"\n\n"), "broken JSON"),
        (Script(raw=b'data: {"error": {"message": "out of memory"}}\n\n'), "out of memory"),
        (Script(raw=b"data: " + b"x" * (3 << 20)), "without an end"),
        (Script(status="503 Service Unavailable", body=b"loading"), "HTTP 503: loading"),
        (Script(status="400 Bad Request", body=b"x" * 100_000), "HTTP 400: xxx"),
        (Script(status="200 OK", body=b"<html>no stream</html>"), "no stream of events came"),
        (Script(pieces=("all at once",)), "at once: no decode speed"),
    ],
)
def test_what_breaks_is_a_value_with_its_reason(script, expected):
    with serving(script) as (url, _):
        result = run(url, users=2)
    assert isinstance(result, NotMeasured)
    assert expected in result.reason
    assert len(result.errors) == 2
    assert len(result.reason) < 400


def test_a_stalled_stream_is_given_up():
    with serving(Script(stall_after=2)) as (url, _):
        result = run(url, stall_s=2, timeout_s=600)
    assert isinstance(result, NotMeasured)
    assert "stalled" in result.reason


def test_an_answer_that_takes_too_long_is_given_up():
    with serving(Script(pieces=("x ",) * 10_000, wait_s=0.05)) as (url, _):
        result = run(url, timeout_s=2)
    assert isinstance(result, NotMeasured)
    assert "no end after" in result.reason


def test_nobody_listening():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        result = run(f"http://127.0.0.1:{bound.getsockname()[1]}")
    assert isinstance(result, NotMeasured)
    assert "connection refused" in result.reason


@pytest.mark.parametrize(
    "url", ["", "no address", "ftp://127.0.0.1", "http://127.0.0.1:99999", "http://[::1"]
)
def test_what_is_no_address(url):
    assert isinstance(run(url), NotMeasured)


def test_a_server_that_dies_midway_tells_how_many_rounds_went_well():
    def answer(number):
        if number == 2:
            raise ConnectionError
        return ("a ", "b ", "c")

    with serving(Script(answer_of=answer, wait_s=0.05)) as (url, _):
        result = run(url, rounds=3)
    assert isinstance(result, NotMeasured)
    assert result.completed_rounds == 1


def test_wrong_usage_is_a_fault_and_not_an_error():
    with serving(Script(wait_s=0.05, usage={"prompt_tokens": 7, "completion_tokens": 36})) as (url, _):
        result = run(url)
    assert isinstance(result, Measurement)
    assert result.faults[0].startswith("wrong-count: 2 of 2 answers")


def test_nonsense_settings_are_a_callers_error():
    with pytest.raises(ValueError, match="one or more"):
        run("http://127.0.0.1:1", users=0)


def test_proxies_of_the_environment_are_left_alone(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    with serving(Script(wait_s=0.05)) as (url, _):
        assert isinstance(run(url), Measurement)


def test_bodies_are_json_of_bounded_size():
    with serving(Script(wait_s=0.05)) as (url, seen):
        run(url)
    assert all(len(json.dumps(body)) < 2000 for body in seen.bodies)

import json
from dataclasses import replace

import pytest

from dflash_deploy.bench.endpoint import Endpoint
from dflash_deploy.bench.measurement import Quantiles
from dflash_deploy.bench.play import run_protocol
from dflash_deploy.bench.protocols import PROTOCOLS, Options
from dflash_deploy.bench.record import run_of
from dflash_deploy.bench.server_side import ServerFigures
from dflash_deploy.bench.workloads.prompt import ask
from dflash_deploy.machine.gpu import GpuSample

from .sse_server import Script, serving


def quick(name, **given):
    """The protocol with answers of nine tokens."""
    return replace(PROTOCOLS[name], output_tokens=9, **given)


def test_the_write_ups_protocols_are_what_it_says():
    single, four = PROTOCOLS["write-up-single"], PROTOCOLS["write-up-four"]
    assert (single.users, single.output_tokens, single.rounds) == ((1,), 1024, 3)
    assert (four.users, four.output_tokens, four.warm_up, four.rounds) == ((4,), 1024, 1, 1)
    with serving(Script(wait_s=0.01)) as (url, seen):
        run_protocol(Endpoint(url), single)
    for body in seen.bodies:
        assert body["max_tokens"] == 1024
        assert body["temperature"] == 0
        assert body["chat_template_kwargs"] == {"enable_thinking": False}
        assert body["ignore_eos"] is True


def test_four_users_have_a_cold_and_a_warm_round_with_a_row_each():
    with serving(Script(wait_s=0.02, together=4)) as (url, seen):
        result = run_protocol(Endpoint(url), quick("write-up-four"))
    assert [(level.label, level.cold) for level in result.levels] == [("cold", True), ("round 1", False)]
    for level in result.levels:
        assert [row.user for row in level.per_user] == [0, 1, 2, 3]
        assert all(row.tokens_per_s > 0 and row.output_tokens == 9 for row in level.per_user)
        assert level.figures.total_tokens_per_s > 0
    assert seen.most == 4
    assert (result.kind, result.stopped, result.notes, result.gpu) == ("measured", None, (), None)


def test_no_prompt_is_asked_twice_at_any_level():
    with serving(Script(wait_s=0.005)) as (url, seen):
        result = run_protocol(
            Endpoint(url),
            quick("throughput", users=(1, 3), rounds=2, passes=2),
            Options(prompts=[ask("Hm?")]),
        )
    prompts = [body["messages"][0]["content"] for body in seen.bodies]
    assert len(set(prompts)) == len(prompts) == 1 + 2 + 3 + 6 + 2 + 6, "warmed up once"
    assert [level.label for level in result.levels] == ["1 user", "3 users"] * 2
    assert [level.figures.requests for level in result.levels] == [2, 6, 2, 6]


def test_a_workload_about_caches_is_asked_as_it_is_and_says_so():
    with serving(Script(wait_s=0.005)) as (url, seen):
        options = Options(prompts=[ask("Hm?")], salt=None)
        result = run_protocol(Endpoint(url), quick("latency", rounds=2), options)
    assert {body["messages"][0]["content"] for body in seen.bodies} == {"Hm?"}
    assert "not salted" in result.notes[0]


def test_a_cache_that_helped_all_the_same_is_noted():
    usage = {"prompt_tokens": 7, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 5}}
    with serving(Script(wait_s=0.005, usage=usage)) as (url, _):
        result = run_protocol(Endpoint(url), quick("latency", rounds=2))
        unsalted = run_protocol(Endpoint(url), quick("latency", rounds=2), Options(salt=None))
    (note,) = result.notes
    assert "71% of the prompts' tokens were in the server's prefix cache" in note
    (note,) = unsalted.notes
    assert "not salted" in note


def test_tokens_that_others_asked_for_meanwhile_are_noted():
    with serving(Script(wait_s=0.005)) as (url, _):
        result = run_protocol(Endpoint(url), quick("latency", rounds=3, warm_up=2))
    ours = (3 + 2) * 9
    for made, notes in ((None, []), (ours, []), (ours + 9, []), (2 * ours, [f"made {ours} tokens more"])):
        run = run_of("bench", replace(result, server=ServerFigures(generated_tokens=made)), read_text=False)
        assert len(run.notes) == len(notes)
        assert all(words in note for words, note in zip(notes, run.notes, strict=True))


def test_tokens_that_counted_prompts_are_ours():
    with serving(Script(wait_s=0.001, counts=True)) as (url, seen):
        result = run_protocol(Endpoint(url), quick("context-ladder", prompt_tokens=(50, 100)))
    assert result.warm_up_tokens == sum(body.get("max_tokens") == 1 for body in seen.bodies) > 4


def test_requests_may_come_at_a_rate():
    with serving(Script(wait_s=0.005)) as (url, _):
        result = run_protocol(Endpoint(url), quick("latency", rounds=5), Options(rate_per_s=50.0))
    (level,) = result.levels
    assert level.label == "50 requests/s"
    assert level.figures.requests == 5
    assert level.figures.waited_s is not None


def test_a_soak_is_told_by_the_minute():
    with serving(Script(wait_s=0.01)) as (url, _):
        result = run_protocol(Endpoint(url), quick("soak", users=(2,), duration_s=0.3))
    assert [level.label for level in result.levels] == ["2 users", "minute 1"]
    assert result.levels[0].figures.requests >= result.levels[1].figures.requests >= 2


def test_a_ladder_climbs_to_the_end_of_the_context():
    # It neither tokenizes nor answers in one piece, so its prompts cannot be counted.
    with serving(Script(wait_s=0.005)) as (url, _):
        result = run_protocol(Endpoint(url, context_tokens=4096), quick("context-ladder"))
    assert result.levels == ()
    assert "does not count" in result.stopped
    with serving(Script(wait_s=0.005)) as (url, seen):
        result = run_protocol(Endpoint(url, context_tokens=1000), quick("context-ladder"))
    assert not seen.bodies
    assert "no room for a prompt of 1,024" in result.notes[0]


def test_what_a_reader_must_know_is_noted():
    with serving(Script(wait_s=0.005, usage=None)) as (url, _):
        result = run_protocol(Endpoint(url), quick("write-up-single"), Options(estimate_tokens=True))
    assert "does not count its tokens" in result.notes[0]
    with serving(Script(wait_s=0.005, usage={"completion_tokens": 5})) as (url, _):
        result = run_protocol(Endpoint(url), quick("write-up-single"))
    assert result.notes == ("not every answer had 9 tokens",)


@pytest.mark.parametrize("name", ["write-up-four", "throughput", "soak"])
def test_a_server_that_is_away_stops_the_protocol(name):
    with serving(Script(status="503 Busy", body=b"loading")) as (url, _):
        result = run_protocol(Endpoint(url), quick(name, duration_s=0.3 if name == "soak" else None))
    assert "HTTP 503: loading" in result.stopped
    assert result.levels[0].figures.errors.keys() == {"busy"}


def test_the_card_is_watched_meanwhile():
    sample = GpuSample(2500, 9000, 400.0, 60, ("software power cap",), 1000)
    with serving(Script(wait_s=0.01)) as (url, _):
        result = run_protocol(Endpoint(url), quick("write-up-single"), gpu=lambda: sample)
    assert result.gpu.vram_peak_mib == 1000
    assert result.gpu.clock_sm_mhz.median == 2500


def test_prompts_of_an_exact_length_are_asked_on_a_ladder():
    with serving(Script(wait_s=0.01, tokenizes=True)) as (url, seen):
        result = run_protocol(Endpoint(url), quick("context-ladder", prompt_tokens=(100, 250)))
    assert [level.prompt_tokens for level in result.levels] == [100, 250]
    chats = [body for body in seen.bodies if "max_tokens" in body]
    assert [len(body["messages"][0]["content"].split()) for body in chats] == [100, 100, 250, 250]
    assert all(level.prefill_tokens_per_s > 0 for level in result.levels)
    assert len({json.dumps(body) for body in chats}) == 4


@pytest.mark.parametrize("counts", ["tokenizes", "counts"])
@pytest.mark.parametrize(
    ("beyond", "note"), [("refuses", "refuses a prompt of 300 tokens"), ("cuts", "cuts off the rest")]
)
def test_a_ladder_ends_where_the_server_takes_no_longer_prompt(counts, beyond, note):
    script = Script(wait_s=0.001, longest_words=200, beyond=beyond)
    with serving(replace(script, **{counts: True})) as (url, seen):
        result = run_protocol(Endpoint(url), quick("context-ladder", prompt_tokens=(100, 300, 500)))
    assert [level.users for level in result.levels] == [1]
    assert result.stopped is None
    assert note in result.notes[0]
    assert len(seen.bodies) < 50


def test_a_client_that_does_not_keep_up_is_told():
    with serving(Script(wait_s=0.001)) as (url, _):
        played = run_protocol(Endpoint(url), quick("latency"), Options(arrivals_s=(0.0, 0.05)))
    (level,) = (one for one in played.levels if not one.cold)
    for late_s, told in ((0.001, False), (0.3, True)):
        figures = replace(level.figures, waited_s=Quantiles.of([late_s, late_s]))
        late = replace(played, levels=(replace(level, figures=figures),))
        notes = run_of("bench", late, read_text=False).notes
        assert any("sent 300 ms after they were due" in note for note in notes) is told


def test_several_users_ask_prompts_of_an_exact_length():
    with serving(Script(wait_s=0.001, tokenizes=True)) as (url, seen):
        result = run_protocol(
            Endpoint(url), quick("context-ladder", prompt_tokens=(150, 200), users=(1, 3), rounds=1)
        )
    assert [(level.users, level.label, level.prompt_tokens) for level in result.levels] == [
        (1, "150 tokens", 150),
        (1, "200 tokens", 200),
        (3, "3 users, 150 tokens", 150),
        (3, "3 users, 200 tokens", 200),
    ]
    chats = [body["messages"] for body in seen.bodies if body.get("stream")]
    words = [sum(len(message["content"].split()) for message in messages) for messages in chats]
    assert words == [150, 200, *[150] * 3, *[200] * 3]


@pytest.mark.parametrize("name", list(PROTOCOLS))
def test_no_prompt_begins_as_another_did(name):
    more = {"prompt_tokens": (150, 200)} if name == "context-ladder" else {"duration_s": None}
    with serving(Script(wait_s=0, tokenizes=True)) as (url, seen):
        run_protocol(Endpoint(url), quick(name, users=(1, 2), **more))
    begins = [body["messages"][0]["content"].split("]")[0] for body in seen.bodies if body.get("stream")]
    assert len(begins) > 4
    assert len(set(begins)) == len(begins)


def test_a_server_that_dies_of_a_long_prompt_has_failed():
    script = Script(wait_s=0.001, tokenizes=True, longest_words=200, beyond="dies")
    with serving(script) as (url, _):
        result = run_protocol(Endpoint(url), quick("context-ladder", prompt_tokens=(100, 300, 500)))
    assert "out of memory" in result.stopped
    assert [dict(level.figures.errors) for level in result.levels] == [{}, {"http": 1}]


def test_a_prompt_of_ones_own_is_longer_than_the_first_steps_of_a_ladder():
    own = (ask("word " * 180),)
    with serving(Script(wait_s=0.001, tokenizes=True)) as (url, _):
        result = run_protocol(
            Endpoint(url), quick("context-ladder", prompt_tokens=(100, 250)), Options(prompts=own)
        )
    assert [level.prompt_tokens for level in result.levels] == [250]
    assert "a prompt itself has 180 tokens" in result.notes[0]


def test_no_prompt_of_a_ladder_is_in_the_cache_for_having_been_counted():
    usage = {"prompt_tokens": 101, "completion_tokens": 9}
    with serving(Script(wait_s=0.01, counts=True, usage=usage)) as (url, seen):
        result = run_protocol(Endpoint(url), quick("context-ladder", prompt_tokens=(100,)))
    (level,) = result.levels
    assert level.prompt_tokens == 101, "as the requests themselves were counted"
    begins = {
        stream: {body["messages"][0]["content"][:9] for body in seen.bodies if body.get("stream") is stream}
        for stream in (True, None)
    }
    assert len(begins[True]) == 2
    assert not begins[True] & begins[None]


def test_a_server_that_dies_under_a_soak_ends_it():
    def answer(number):
        if number > 30:
            raise ConnectionError
        return ("a ", "b ", "c")

    with serving(Script(answer_of=answer, wait_s=0.001)) as (url, seen):
        result = run_protocol(Endpoint(url), quick("soak", duration_s=600.0))
    assert 40 < len(seen.bodies) < 80
    assert result.levels[0].figures.errors["cut"] >= 20
    assert result.levels[0].figures.output_tokens > 0

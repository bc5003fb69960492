import json
import random
import threading
import time
from dataclasses import replace

import pytest

from dflash_deploy.bench.endpoint import Endpoint
from dflash_deploy.bench.quality.asking import ask
from dflash_deploy.bench.quality.exam import agreement, examine, faults_beside, sheet
from dflash_deploy.bench.workloads import Message, Prompt
from tests.simulator.conftest import ONE_USER, launching

from .chat_server import Told, answering, good

SHEET = sheet()
FREE = {prompt.question for prompt in SHEET.free}


def examined(answer, *, users=2, **options):
    with answering(answer) as (url, seen):
        found = examine(Endpoint(url, "m"), SHEET, users=users, timeout_s=20, **options)
    return found, seen


def ids(found):
    return [fault.split(":")[0] for fault in found.faults]


def is_free(body):
    return body["messages"][-1]["content"] in FREE


@pytest.fixture(scope="module")
def perfect():
    return examined(good)[0]


def test_a_good_model_passes(perfect):
    assert perfect.faults == ()
    assert not perfect.missed
    assert {kind: (score.asked, score.right) for kind, score in perfect.scores.items()} == {
        "exact": (10, 10),
        "json": (4, 4),
        "tool": (4, 4),
        "copy": (4, 4),
    }
    assert (perfect.repeated, perfect.repeated_same) == (3, 3)
    assert {mode: len(said) for mode, said in perfect.answers.items()} == {
        "alone": 6,
        "together": 6,
        "cached": 4,
    }
    assert perfect.refused == 0


def test_questions_come_in_two_languages_and_fit_the_context():
    assert {item.prompt.language for item in SHEET.known} == {"en", "zh-TW"}
    assert {prompt.language for prompt in SHEET.free} == {"en", "zh-TW"}
    assert {second.language for _, second in SHEET.talks} == {"en", "zh-TW"}
    assert any(item.prompt.task == "long-context" for item in SHEET.known)
    small = sheet(context_tokens=1024)
    assert len(small.known) == len(SHEET.known)
    assert all(item.prompt.task != "long-context" for item in small.known)


def test_everything_is_asked_greedily_and_second_turns_follow_their_first(perfect):
    _, seen = examined(good, users=4)
    assert all(body["temperature"] == 0 for body in seen.bodies)
    assert seen.most <= 4
    asked = [body["messages"] for body in seen.bodies]
    for first, second in SHEET.talks:
        at = asked.index([message._asdict() for message in first.messages])
        assert asked[at + 1] == [message._asdict() for message in second.messages]


WORDS = ["river", "stone", "paper", "metal", "garden", "window", "letter", "silver", "morning"]


def noise(body, before):
    chance = random.Random(str(body["messages"]))  # noqa: S311
    return Told("".join(chance.choice("\ufffdÃ\u0000Â¤§^~{}") for _ in range(400)))


def babble(body, before):
    chance = random.Random(str(body["messages"]))  # noqa: S311
    return Told(" ".join(chance.choice(WORDS) for _ in range(80)))


THOUGHTS = (
    "Okay, the user wants something of me. First I look at what exactly is asked, and in which form it "
    "should be given. Then I weigh two or three ways to say it and take the plainest one. "
)


def test_a_model_that_thinks_in_english_is_judged_by_its_answers():
    found, _ = examined(lambda body, _: replace(good(body), thoughts=THOUGHTS))
    assert found.faults == ()
    assert not found.missed
    assert found.unbegun == 0


def test_thoughts_that_stand_in_the_text_are_thoughts_too():
    def in_the_text(body, _):
        told = good(body)
        return replace(told, text=f"<think>\n{THOUGHTS}\n</think>\n\n{told.text}")

    found, _ = examined(in_the_text)
    assert found.faults == ()
    assert not found.missed
    found, _ = examined(lambda *_: Told(f"<think>{THOUGHTS}", ended=False))
    assert found.faults == ()
    assert (found.scores, found.unbegun > 0) == ({}, True)


def test_an_answer_that_is_thoughts_to_its_end_is_no_wrong_one():
    found, _ = examined(lambda *_: Told("", thoughts=THOUGHTS, ended=False))
    assert found.faults == ()
    assert found.scores == {}
    assert found.unbegun == len(SHEET.known) + 2 * len(SHEET.free) + 2 * 3 + 2 * len(SHEET.talks)
    found, _ = examined(lambda *_: Told("", thoughts="nan " * 80, ended=False))
    assert set(ids(found)) & {"nan", "repetition"}


def in_russian(body, before):
    return Told("Река течёт мимо города, и каждое утро над водой стоит туман, пока не взойдёт солнце. " * 2)


def drifting(body, before):
    told = good(body)
    return replace(told, text=told.text[:200] + in_russian(body, before).text) if is_free(body) else told


def always(**told):
    return lambda *_: Told(**told)


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (noise, "mojibake"),
        (always(text=""), "empty"),
        (always(text="!" * 500), "repetition"),
        (always(text="nan nan nan nan nan"), "nan"),
        (babble, "wrong-answers"),
        (in_russian, "language-drift"),
        (drifting, "language-drift"),
        (lambda body, _: Told("Yes.") if is_free(body) else good(body), "length-collapse"),
        (lambda body, _: replace(good(body), tokens=5000), "wrong-count"),
        (always(status=500, raw=b"CUDA error"), "no-answer"),
        (always(raw=b"[1, 2"), "no-answer"),
        (always(raw=b'{"choices": []}'), "no-answer"),
        (always(status=400, raw=b"no such model"), "no-answer"),
    ],
)
def test_every_way_of_being_wrong_is_named_with_an_example(answer, fault):
    found, _ = examined(answer, users=1)
    assert fault in ids(found)
    assert "for example" in next(text for text in found.faults if text.startswith(fault))


def test_answers_that_never_begin_alike_are_unstable():
    def restless(body, before):
        told = good(body)
        return replace(told, text="ABCDE"[before % 5] + told.text) if is_free(body) else told

    found, _ = examined(restless)
    assert ids(found) == ["unstable"]
    assert found.repeated_same == 0


def test_some_wrong_answers_condemn_no_server_but_are_counted():
    found, _ = examined(lambda body, _: Told("Peru") if "tools" not in body else good(body))
    assert found.scores["exact"].right == 0
    one_off, _ = examined(
        lambda body, _: (
            replace(good(body), text="I cannot tell.")
            if body["messages"][-1]["content"] == SHEET.known[0].prompt.question
            else good(body)
        )
    )
    assert one_off.faults == ()
    assert list(one_off.missed) == [SHEET.known[0].prompt.id]


def test_a_server_without_tools_or_extras_is_asked_without():
    def plain(body, before):
        if "tools" in body or "return_token_ids" in body:
            return Told(status=400, raw=b'{"error": "unknown field"}')
        return good(body)

    found, _ = examined(plain)
    assert found.faults == ()
    assert found.refused == 4
    assert "tool" not in found.scores


def test_a_model_of_random_weights_is_not_judged_by_its_words():
    found, seen = examined(noise, knows=False, read_text=False)
    assert found.faults == ()
    assert found.scores == {}
    assert len(seen.bodies) == 6 + 6 + 8 + 6


def test_the_key_goes_into_the_header():
    with answering(good) as (url, seen):
        examine(Endpoint(url, "m", api_key="s3cret"), SHEET, users=1)
    assert {headers["authorization"] for headers in seen.headers} == {"Bearer s3cret"}


def test_nobody_there():
    found = examine(Endpoint("http://127.0.0.1:9", "m"), SHEET, users=2)
    assert ids(found) == ["no-answer"]
    assert examine(Endpoint("http://[::1", "m"), SHEET, users=1).faults


def test_agreement_with_plain_decoding(perfect):
    def parting(body, before):
        told = good(body)
        return replace(told, text=told.text[:300] + " But no.") if is_free(body) else told

    found, _ = examined(parting)
    beside = agreement(found, perfect)
    assert beside["alone"].identical == 0
    assert beside["alone"].diverge_after == pytest.approx(75, rel=0.4)
    assert not beside["alone"].counted
    assert beside["cached"].identical == 4
    assert faults_beside(found, perfect) == ()
    assert faults_beside(perfect, perfect) == ()


def test_what_plain_decoding_knew_and_this_does_not_is_a_fault(perfect):
    def forgetful(body, before):
        return Told("It is uncertain, and I would rather not say.") if "tools" in body else good(body)

    found, _ = examined(forgetful)
    assert found.faults == ()
    assert faults_beside(found, perfect) == ()  # four of 22, and all of one kind
    worse, _ = examined(
        lambda body, before: Told("It is uncertain.") if before == 0 and not is_free(body) else good(body)
    )
    assert any(fault.startswith("wrong-answers") for fault in faults_beside(worse, perfect))


def test_other_words_from_the_start_are_a_fault(perfect):
    found, _ = examined(lambda body, before: replace(good(body), text=f"{before} {good(body).text}"))
    assert any(fault.startswith("alone: agreement") for fault in faults_beside(found, perfect))


@pytest.fixture(scope="module")
def simulators(tmp_path_factory):
    with launching(tmp_path_factory.mktemp("exam")) as launch:
        yield launch


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        ("", []),
        ("garbage", ["mojibake"]),
        ("repeat", ["repetition"]),
        ("wrong-usage", ["wrong-count"]),
    ],
)
def test_every_garbage_of_the_simulator_is_caught(simulators, fault, names):
    server = simulators(f"{ONE_USER} --enable-cache-report", fault=fault, scale=2000)
    endpoint = Endpoint(f"http://127.0.0.1:{server.port}")
    found = examine(endpoint, sheet(context_tokens=2048), users=2, knows=False)
    # Its cache has a prompt's state every 256 tokens alone; both documents are longer.
    assert found.cached_tokens >= 2 * 256
    assert set(names) <= set(ids(found))
    assert bool(found.faults) == bool(names), found.faults


@pytest.mark.parametrize(
    "raw",
    [
        b"[]",
        b"7",
        b'{"choices": []}',
        b'{"choices": [[]]}',
        b'{"choices": [{"message": []}]}',
        b'{"choices": [{"message": {"content": "a", "tool_calls": ["x"]}}]}',
        b'{"choices": [{"message": {"content": "a"}}], "usage": {"completion_tokens": %s}}' % (b"9" * 400),
        b"[" * 100_000,
    ],
)
def test_any_answer_is_taken_or_refused_in_words(raw):
    with answering(lambda *_: Told(raw=raw)) as (url, _):
        (reply,) = ask(Endpoint(url, "m"), [Prompt("q", (Message("user", "Why?"),))], max_tokens=8)
    assert reply.error == "the answer is no chat completion" or reply.answer.tokens is None


@pytest.mark.parametrize(
    ("choice", "text", "error"),
    [
        ({"message": {"reasoning": "Hm. ", "content": "Yes."}}, "Hm. Yes.", None),
        ({"message": {"content": [{"type": "text", "text": "Yes."}]}}, "Yes.", None),
        ({"message": {"content": "Y"}, "finish_reason": "abort"}, "", "gave the answer up"),
    ],
)
def test_answers_in_other_forms(choice, text, error):
    raw = json.dumps({"choices": [choice]}).encode()
    with answering(lambda *_: Told(raw=raw)) as (url, _):
        (reply,) = ask(Endpoint(url, "m"), [Prompt("q", (Message("user", "Why?"),))], max_tokens=8)
    assert reply.said.text == text
    assert (error or "") in (reply.error or "")
    assert bool(error) == bool(reply.error)


def test_a_server_that_hangs_is_given_up():
    """Sixty questions at five minutes each would be an afternoon."""
    hung = threading.Event()

    def hang(body, before):
        hung.wait(30)
        return Told("late")

    try:
        with answering(hang) as (url, seen):
            found = examine(Endpoint(url, "m"), sheet(), users=1, timeout_s=0.3)
            # What was asked is read even where a busy machine comes to it after the asker has left.
            until = time.monotonic() + 60
            while len(seen.bodies) < 2 and time.monotonic() < until:
                time.sleep(0.01)
            asked = len(seen.bodies)
            hung.set()
    finally:
        hung.set()
    assert asked == 2
    assert "no-answer" in found.faults[0]
    assert "no answer within" in found.faults[0]

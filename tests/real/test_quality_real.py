"""Agreement on the real server: in float32 speculation loses nothing, and a changed token is found."""

from __future__ import annotations

import json

import httpx
import pytest

from dflash_deploy.bench.endpoint import Endpoint, discover
from dflash_deploy.bench.quality.asking import ask
from dflash_deploy.bench.quality.exam import Examination, Sheet, agreement, examine, faults_beside, sheet
from tests.bench.quality.chat_server import Told, answering

from .conftest import Running

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

_WHOLE = sheet(context_tokens=600)
SHEET = Sheet(known=(), free=_WHOLE.free[:3], talks=_WHOLE.talks[:2])
TOKENS = 48
CHANGED_AT = 20


@pytest.fixture(scope="module")
def examined(speculating: Running, plain: Running) -> dict[str, Examination]:
    def one(running: Running) -> Examination:
        # The model is random: it knows nothing, and no language.
        return examine(
            discover(running.launch.base_url),
            SHEET,
            users=3,
            knows=False,
            read_text=False,
            text_tokens=TOKENS,
            timeout_s=300,
        )

    return {"ngram": one(speculating), "plain": one(plain)}


def test_speculation_and_plain_decoding_agree_token_for_token(examined):
    found = agreement(examined["ngram"], examined["plain"])
    assert {mode: (one.prompts, one.identical) for mode, one in found.items()} == {
        "alone": (3, 3),
        "together": (3, 3),
        "cached": (2, 2),
    }
    answers = examined["ngram"].answers["alone"].values()
    assert all(said.token_ids and len(said.token_ids) == said.tokens for said in answers)


def test_greedy_answers_repeat_and_raise_no_alarm(examined):
    for one in examined.values():
        assert one.faults == ()
        assert (one.repeated, one.repeated_same) == (3, 3)
        assert one.refused == 0
    assert faults_beside(examined["ngram"], examined["plain"]) == ()


def test_one_changed_token_is_found(speculating, examined):
    """A server between us and the real one exchanges a token of one answer."""
    changed = SHEET.free[1].question

    def relay(body: dict, _before: int) -> Told:
        answer = httpx.post(f"{speculating.launch.base_url}/v1/chat/completions", json=body, timeout=300)
        content = answer.raise_for_status().json()
        if body["messages"][-1]["content"] == changed:
            choice = content["choices"][0]
            choice["response_token_ids"][CHANGED_AT] += 1
            choice["message"]["content"] = choice["message"]["content"][:40] + "#"
        return Told(raw=json.dumps(content).encode())

    with answering(relay) as (url, _):
        replies = ask(Endpoint(url), SHEET.free, max_tokens=TOKENS, timeout_s=300)
    said = {prompt.id: reply.said for prompt, reply in zip(SHEET.free, replies, strict=True)}
    ours = Examination({}, {}, (), {"alone": said}, 0, 0, None, 0)
    found = agreement(ours, examined["plain"])["alone"]
    assert (found.prompts, found.identical) == (3, 2)
    assert found.diverge_after == CHANGED_AT
    assert found.counted

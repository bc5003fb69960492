import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.bench import redaction
from dflash_deploy.bench.redaction import redacted
from dflash_deploy.bench.results import Failure, Machine, Quality, ResultFile, digest
from tests.compare.samples import result_of, run_of

SECRETS = ("alice", "box.example.org", "192.168.7.9", "sk-123", "Zanzibar", "/home")


def test_nothing_that_names_a_person_is_left_after_redaction():
    run = run_of(
        "dflash",
        [207.0],
        url="http://alice@box.example.org:30000/v1",
        model="/home/alice/models/Qwen3.8-27B",
        outcome="unfit",
        reason="mojibake: 1 of 3 answers, for example 'Zanzibar'; see /home/alice/log.txt on box.example.org",
        flags={
            "model-path": "/home/alice/models/Qwen3.8-27B",
            "api-key": "sk-123",
            "admin-api-key": "sk-123",
            "dist-init-addr": "192.168.7.9:5000",
            "mem-fraction-static": 0.85,
            "speculative-draft-model-path": "alice/My-Draft",
        },
        failures=[Failure(kind="http", count=2, example="HTTP 500: 'Zanzibar' at http://192.168.7.9:3000/x")],
        quality=Quality(
            missed={"math-001": "no '42' in 'Zanzibar'"},
            faults=["empty: 1 of 9 answers, for example tools-001: 'Zanzibar'"],
            digests={"alone": {"math-001": digest("Zanzibar")}},
        ),
    )
    shown = redacted(result_of(run))
    text = shown.model_dump_json()
    for secret in SECRETS:
        assert secret not in text, secret
    (cut,) = shown.runs
    assert cut.flags["model-path"] == cut.model == "Qwen3.8-27B"
    assert cut.flags["mem-fraction-static"] == 0.85
    assert cut.quality.digests == run.quality.digests
    assert cut.quality.faults == ["empty: 1 of 9 answers"]
    assert shown.redacted
    assert cut.loads == run.loads
    ResultFile.model_validate_json(text)


@pytest.mark.parametrize(
    "place",
    [
        "fe80::1ff:fe23:4567:890a%eth0",
        "2001:db8::1",
        "::ffff:10.0.0.1",
        "2001:0db8:85a3:0000:0000:8a2e:0370:7334",
        "C:\\Users\\Ann Smith\\models\\x",
        "\\\\server\\share\\x",
        "/home/ann/my models/qwen",
        "api_key: topsecret",
        "password=hunter2",
        "AKIAIOSFODNN7EXAMPLE",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-def_ghi",
        "glpat-abcdefghij",
    ],
)
def test_nothing_of_a_place_or_key_is_left(place):
    for words in (f"no way to {place} here", place, f"error: {place}, and more"):
        (run,) = redacted(result_of(run_of("x", [1.0], reason=words, outcome="failed"))).runs
        left = re.sub("<[a-z]+>", "", run.reason)
        assert set(re.findall(r"\w+", left)) <= {"no", "way", "to", "here", "error", "and", "more"}


def test_hosts_go_from_flags_and_a_servers_words_from_notes():
    run = run_of(
        "x",
        [1.0],
        flags={"host": "head", "dist-init-addr": "head:5000", "nccl-port": 7},
        outcome="unstable",
        failures=[Failure(kind="server", count=3, example="one thing")],
        notes=[
            "it ended early: 4 users: another thing about Zanzibar",
            "it ended early: cold: HTTP 500: x y",
        ],
    )
    (cut,) = redacted(result_of(run)).runs
    assert cut.flags == {"host": "<address>", "dist-init-addr": "<address>", "nccl-port": 7}
    assert cut.notes == ["it ended early: 4 users", "it ended early: cold: HTTP 500"]


PATHS = st.from_regex(r"/(home|Users|root)/[a-z]{4,12}(/[a-zA-Z0-9._-]{1,20}){1,4}", fullmatch=True)
ADDRESSES = st.ip_addresses(v=4).map(str) | st.from_regex(
    r"https?://[a-z]{5,12}\.lan(:[0-9]{4})?/x", fullmatch=True
)


@given(
    st.lists(PATHS | ADDRESSES, min_size=1, max_size=4), st.sampled_from([" ", ": ", ", ", "\n", " (", "="])
)
def test_paths_and_addresses_go_wherever_they_stand(places, between):
    reason = between.join(["error at", *places, "end"])
    (run,) = redacted(result_of(run_of("x", [1.0], reason=reason, outcome="failed"))).runs
    for place in places:
        assert place not in run.reason


WORDS_OF_OTHERS = (
    "Incorrect API key provided: s3cret-key-of-mine",
    "no model at /srv/ann/models",
    "cannot tokenize Zanzibar is warm",
    "mail bob@example.org",
    "fe80::1:2:3 and ::1 refused",
    "token hf_AbCdEfGhIjKl",
    "no to alice, said carbox",
)


def test_no_word_of_a_server_is_left(monkeypatch):
    monkeypatch.setattr(redaction, "_names_here", lambda: ("carbox", "alice"))
    for words in WORDS_OF_OTHERS:
        example = f"HTTP 401: {words}"
        run = run_of(
            "bench",
            [1.0],
            outcome="unstable",
            reason=example,
            model="/srv/x-alice-7b",
            notes=[f"it ended early: cold: {example}"],
            failures=[Failure(kind="denied", count=1, example=example)],
            flags={"json-model-override-args": f'{{"a": "/{words}"}}', "hf-token": words},
        )
        text = redacted(result_of(run, machine=Machine(kernel="6.1.0-carbox"))).model_dump_json()
        for secret in ("s3cret", "/srv", "Zanzibar", "bob@", "fe80", "hf_AbC", "carbox", "alice"):
            assert secret not in text, (secret, text)
        assert '"reason":"HTTP 401"' in text
        assert "it ended early: cold: HTTP 401" in text


def test_who_works_here_is_known(monkeypatch):
    monkeypatch.setattr(redaction, "getuser", lambda: "ann-marie")
    monkeypatch.setattr(redaction, "node", lambda: "ada.lan")
    redaction._names_here.cache_clear()
    try:
        run = run_of("none", [1.0], outcome="failed", reason="start: Ann-Marie on ada: no disk, radar")
        (cut,) = redacted(result_of(run)).runs
    finally:
        redaction._names_here.cache_clear()
    assert cut.reason == "start: <name> on <name>: no disk, radar"


def test_what_the_figures_need_is_left():
    run = run_of("dflash", [1.0], model="z-lab/Qwen3.8-27B", engine_version="0.5.23", notes=["speed is fine"])
    (cut,) = redacted(result_of(run)).runs
    assert (cut.model, cut.engine_version, cut.notes) == ("Qwen3.8-27B", "0.5.23", ["speed is fine"])

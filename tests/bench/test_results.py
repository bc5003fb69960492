import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.bench.measurement import RequestResult, Round
from dflash_deploy.bench.results import (
    Failure,
    Quality,
    ResultFile,
    digest,
    read_result,
    redacted,
    round_row,
    workload_hash,
    write_result,
)
from dflash_deploy.bench.workloads import load
from dflash_deploy.errors import DeployError, ExitCode
from tests.compare.samples import result_of, run_of

RESULT = result_of(run_of("none", [62.0, 62.2]), run_of("dflash", [207.0, 208.0]))


def test_what_is_written_is_read_again(tmp_path):
    path = tmp_path / "sub" / "r.json"
    write_result(path, RESULT)
    assert read_result(path) == RESULT


def wrong_files():
    text = RESULT.model_dump(mode="json")
    yield b"", "no result file"
    yield b"not json", "no result file"
    yield b"[" * 100_000, "no result file"
    yield b"[1]", "no result file"
    yield json.dumps({**text, "schema_version": 2}).encode(), "newer dflash-deploy"
    yield json.dumps({**text, "more": 1}).encode(), "more"
    yield json.dumps({**text, "kind": "guessed"}).encode(), "kind"
    yield json.dumps({**text, "created": "2026-01-01T00:00:00"}).encode(), "created"
    yield json.dumps({**text, "workload": {**text["workload"], "sha256": "x"}}).encode(), "sha256"
    yield (json.dumps(text).encode().replace(b"62.0", b"-1.0", 1), "greater than or equal")
    yield (json.dumps(text).encode().replace(b"62.0", b"NaN", 1), "")
    yield (json.dumps(text).encode().replace(b"62.0", b"1e999", 1), "finite")
    yield json.dumps({**text, "tool_version": "x" * 5000}).encode(), "tool_version"


@pytest.mark.parametrize(("content", "words"), list(wrong_files()))
def test_files_of_strangers_are_refused_in_words(tmp_path, content, words):
    path = tmp_path / "r.json"
    path.write_bytes(content)
    with pytest.raises(DeployError) as error:
        read_result(path)
    assert words in error.value.message
    assert error.value.exit_code == ExitCode.INVALID_INPUT
    assert len(error.value.message) < 1000


def test_no_pipe_is_waited_for_and_nothing_huge_is_read(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    huge = tmp_path / "huge"
    with huge.open("wb") as file:
        file.truncate(1 << 30)
    for path in (fifo, huge, tmp_path, Path("/dev/zero")):
        with pytest.raises(DeployError):
            read_result(path)
    with pytest.raises(DeployError) as error:
        read_result(tmp_path / "none")
    assert error.value.exit_code == ExitCode.MISSING


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


def test_a_round_is_kept_user_by_user_with_digests_in_place_of_texts():
    def request(user, tokens, seconds):
        return RequestResult(user, 7, tokens, float(user), 0.5, seconds, seconds + 0.5, f"secret {user}")

    row = round_row("1", Round((request(0, 101, 2.0), request(1, 101, 4.0))))
    assert row.tokens_per_s == pytest.approx(202 / 5.5)
    assert row.user_tokens_per_s == pytest.approx((50 + 25) / 2)
    assert [one.digest for one in row.users] == [digest("secret 0"), digest("secret 1")]
    assert "secret" not in row.model_dump_json()


def test_a_workload_is_known_by_all_that_makes_a_request():
    prompts = load("math")
    one = workload_hash(prompts, users=1, output_tokens=64)
    assert one == workload_hash(prompts, output_tokens=64, users=1)
    others = [
        workload_hash(prompts, users=2, output_tokens=64),
        workload_hash(prompts[1:], users=1, output_tokens=64),
        workload_hash(load("code"), users=1, output_tokens=64),
    ]
    assert len({one, *others}) == 4


def test_the_schema_describes_the_file():
    schema = ResultFile.model_json_schema()
    assert schema["properties"]["schema_version"]["const"] == 1
    assert schema["additionalProperties"] is False
    assert {"machine", "workload", "runs", "kind", "redacted"} <= schema["properties"].keys()

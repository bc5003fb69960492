import json
import os
import resource
from pathlib import Path

import pytest

from dflash_deploy.bench.measurement import LoadFigures, RequestResult
from dflash_deploy.bench.record import round_row
from dflash_deploy.bench.results import (
    ResultFile,
    check_writable,
    digest,
    read_result,
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
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_result(path) == RESULT, "an editor has put a mark in front"


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
    yield json.dumps({**text, "created": "9999-12-31T23:59:59-23:59"}).encode(), "no such moment"
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


def test_a_round_is_kept_user_by_user_with_digests_in_place_of_texts():
    def request(user, tokens, seconds):
        return RequestResult(user, 7, tokens, float(user), 0.5, seconds, seconds + 0.5, f"secret {user}")

    requests = (request(0, 101, 2.0), request(1, 101, 4.0))
    row = round_row("1", requests, LoadFigures.of(requests), counts=True)
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


def test_nothing_but_a_file_is_replaced(tmp_path):
    """Root could replace /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for place in (pipe, tmp_path):
        for write in (check_writable, lambda path: write_result(path, RESULT)):
            with pytest.raises(OSError) as error:
                write(place)
            assert error.value.filename == str(place)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]
    with pytest.raises(OSError):
        check_writable(Path("/proc/none/r.json"))


def test_a_full_disk_is_told_with_the_files_name_and_leaves_the_old_one(tmp_path):
    path = tmp_path / "r.json"
    write_result(path, RESULT)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError) as error:
            write_result(path, RESULT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.filename == str(path)
    assert list(tmp_path.iterdir()) == [path]
    assert read_result(path) == RESULT


def test_what_no_file_can_hold_is_replaced():
    """Half a surrogate pair, from a command line or a server."""
    assert run_of("x", [1.0], model="a\ud800b", notes=["\udcff"]).model_dump_json().count("?") == 2

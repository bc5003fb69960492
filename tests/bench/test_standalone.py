"""The command `bench` against servers that this test starts: a scripted one, and the simulator."""

import json
import subprocess
import sys

import pytest

from dflash_deploy.bench.changes import Changes, changed, read_levels, read_tasks
from dflash_deploy.bench.protocols import PROTOCOLS
from dflash_deploy.bench.results import ResultFile, read_result, write_result
from dflash_deploy.errors import DeployError, ExitCode
from tests.compare.samples import result_of, run_of
from tests.simulator.conftest import FOUR_USERS, launching

from .sse_server import Script, serving


def tool(*arguments, **env):
    return subprocess.run(
        [sys.executable, "-m", "dflash_deploy", "bench", *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "/usr/bin:/bin", **env},
    )


SENTENCES = (
    "The first radiator to bleed is the lowest one, because air rises. ",
    "Turn the key a quarter of the way and wait for the hissing to stop. ",
    "When water comes in an even stream, close the valve again. ",
)
SOUND = Script(pieces=SENTENCES, wait_s=0.02, usage={"prompt_tokens": 7, "completion_tokens": 44})


@pytest.fixture(scope="module")
def simulator(tmp_path_factory):
    with launching(tmp_path_factory.mktemp("bench")) as launch:
        yield f"http://127.0.0.1:{launch(FOUR_USERS, scale=400).port}"


def test_any_server_with_the_chat_interface_is_measured(tmp_path):
    out = tmp_path / "r.json"
    with serving(SOUND) as (url, seen):
        ended = tool(f"{url}/v1", "--rounds", "3", "--out", out, "--output-tokens", "44", "--json")
    assert ended.returncode == 0, ended.stderr
    asked = [body for body in seen.bodies if "messages" in body]
    assert len(asked) == 4
    assert all(body["max_tokens"] == 44 for body in asked)
    result = read_result(out)
    assert result == ResultFile.model_validate(json.loads(ended.stdout)["result"])
    assert result.kind == "measured"
    (run,) = result.runs
    (load,) = run.loads
    assert [(one.name, one.counts) for one in load.rounds] == [
        ("cold", False),
        ("round 1", True),
        ("round 2", True),
        ("round 3", True),
    ]
    assert load.rounds[0].users[0].output_tokens == 44, "by usage, not by the three events"
    assert run.url == url
    assert "1 user, round 3" in ended.stderr
    assert result.workload.protocol == "write-up-single (changed)"


def test_a_level_for_each_number_of_users(simulator):
    ended = tool(simulator, "--users", "1,3", "--output-tokens", "64", "--exam", "--format", "markdown")
    assert ended.returncode == 0, ended.stderr
    assert "(all figures simulated)" in ended.stdout
    rows = [line for line in ended.stdout.splitlines() if line.startswith(("| 1 |", "| 3 |"))]
    assert len([row for row in rows if row.count("|") == 11]) == 2
    assert "3 of 3 got the very same answer" in ended.stdout


def test_requests_at_random_moments(simulator):
    ended = tool(
        simulator,
        "--protocol",
        "latency",
        "--rate",
        "2",
        "--rounds",
        "8",
        "--output-tokens",
        "32",
        "--json",
        "-q",
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    result = json.loads(ended.stdout)["result"]
    assert result["workload"]["arrivals"] == "2/s, seed 0"
    (load,) = result["runs"][0]["loads"]
    assert len(load["rounds"][0]["users"]) == 8
    assert load["label"] == "2 requests/s"
    assert {"ttft_s", "latency_s", "waited_s"} <= load["tails"].keys()


def test_two_live_servers_are_measured_in_turn(simulator):
    ended = tool(simulator, "--against", simulator, "--most-rounds", "4", "--output-tokens", "48")
    assert ended.returncode == 0, ended.stderr
    turns = [line[0] for line in ended.stderr.splitlines() if "cold" not in line]
    assert "".join(turns[:6]) == "ABBAAB"
    assert ended.stdout.splitlines()[-1].startswith("A and B: indistinguishable: keep the simpler")


def test_a_slower_server_is_told_from_a_faster_one():
    slow = Script(pieces=SENTENCES, wait_s=0.2, usage={"prompt_tokens": 7, "completion_tokens": 44})
    with serving(SOUND) as (fast_url, _), serving(slow) as (slow_url, _):
        ended = tool(slow_url, "--against", fast_url, "--cold", "0", "--most-rounds", "5", "-q", "--json")
    assert ended.returncode == 0, ended.stderr
    assert "A is slower than B by" in ended.stderr
    found = json.loads(ended.stdout)["comparison"]
    assert found["verdict"] == "slower"
    assert found["low"] < found["ratio"] < found["high"] < 1


def test_wrong_answers_and_failures_are_results_with_an_exit_status(tmp_path):
    noise = Script(pieces=("\ufffd\x00Ã¤" * 20,) * 3, usage={"completion_tokens": 60})
    with serving(noise) as (url, _):
        ended = tool(url, "--rounds", "1", "-q")
    assert ended.returncode == ExitCode.FAILED
    assert "unfit: mojibake" in ended.stdout
    with serving(Script(status="503 Service Unavailable", body=b"loading")) as (url, _):
        ended = tool(url, "--rounds", "1", "-q", "--json")
    assert ended.returncode == ExitCode.FAILED
    (run,) = json.loads(ended.stdout)["result"]["runs"]
    assert run["outcome"] == "unstable"
    assert run["failures"][0]["kind"] == "busy"


def test_the_key_comes_from_a_private_file_and_stays_out_of_results(tmp_path):
    key = tmp_path / "key"
    key.write_text("s3cret-key\n")
    key.chmod(0o600)
    out = tmp_path / "r.json"
    with serving(SOUND) as (url, seen):
        ended = tool(url, "--rounds", "1", "--api-key-file", key, "--out", out)
        assert ended.returncode == 0, ended.stderr
    assert any(b"bearer s3cret-key" in head for head in seen.heads)
    assert "s3cret" not in out.read_text() + ended.stdout + ended.stderr
    key.chmod(0o644)
    ended = tool("http://127.0.0.1:9", "--api-key-file", key)
    assert ended.returncode == ExitCode.INVALID_INPUT
    assert "chmod 600" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["http://127.0.0.1:9"], ExitCode.UNAVAILABLE, "nobody answers"),
        (["no-address"], ExitCode.USAGE, "http://127.0.0.1:30000"),
        (["--rate", "1"], ExitCode.USAGE, "goes in rounds"),
    ],
)
def test_what_a_person_must_mend(arguments, code, words):
    ended = tool(*arguments)
    assert ended.returncode == code, ended.stderr
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_two_files_side_by_side(tmp_path):
    a, b, other = (tmp_path / f"{name}.json" for name in "abc")
    write_result(a, result_of(run_of("bench", [103.0, 104.0, 105.0])))
    write_result(b, result_of(run_of("bench", [100.0, 101.0, 102.0])))
    write_result(other, result_of(run_of("bench", [100.0]), sha256="1" * 64))
    ended = tool("compare", a, b)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(
        "bench, one user, tokens/s a user: the first is faster than the second by 3.0 % (95 % interval "
    )
    ended = tool("compare", a, other)
    assert ended.returncode == ExitCode.INVALID_INPUT
    assert "other prompts" in ended.stderr
    ended = tool("compare", a, other, "--anyway", "--json")
    assert ended.returncode == 0
    assert "warning: the two were asked different things" in ended.stderr
    assert json.loads(ended.stdout)["pairs"][0]["verdict"] == "indistinguishable"


def test_a_persons_own_prompts_are_asked_as_they_stand(tmp_path):
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "Name a river."}\n{"prompt": "Name a bridge."}\n')
    with serving(SOUND) as (url, seen):
        ended = tool(url, "--workload", own, "--cached", "--rounds", "2", "--output-tokens", "44", "--json")
    assert ended.returncode == 0, ended.stderr
    asked = [body["messages"][-1]["content"] for body in seen.bodies if "messages" in body]
    assert asked == ["Name a river.", "Name a river.", "Name a bridge."]
    result = json.loads(ended.stdout)["result"]
    assert result["workload"]["tasks"] == {}
    assert any("not salted" in note for note in result["runs"][0]["notes"])


def test_protocols_keep_their_names_as_long_as_they_ask_the_same():
    assert changed("write-up-four", Changes()) == PROTOCOLS["write-up-four"]
    assert changed("write-up-single", Changes(rounds=9)).name == "write-up-single"
    other = changed("throughput", Changes(users="2,3", seconds=5, tasks="code"))
    assert (other.name, other.users, other.duration_s) == ("throughput (changed)", (2, 3), 5)
    assert changed("soak", Changes(rounds=2)).duration_s is None
    for wrong in (("magic", Changes()), ("write-up-single", Changes(seconds=1))):
        with pytest.raises(DeployError):
            changed(*wrong)


def test_mixes_and_levels_are_read():
    assert read_tasks("code") == {"code": 1.0}
    assert read_tasks("instruction=2, math=0.5") == {"instruction": 2.0, "math": 0.5}
    assert read_levels("4, 1,4") == (4, 1)
    for wrong in ("", "code=-1", "code=inf", "code=x", "code=0"):
        with pytest.raises(DeployError):
            read_tasks(wrong)
    for wrong in ("", "0", "-1", "1.5", "99999"):
        with pytest.raises(DeployError):
            read_levels(wrong)

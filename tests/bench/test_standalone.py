"""The command `bench` against servers that this test starts: a scripted one, and the simulator."""

import io
import json
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import pytest

from dflash_deploy.bench.against import bench_both
from dflash_deploy.bench.changes import Changes, changed, read_levels, read_tasks
from dflash_deploy.bench.endpoint import Endpoint
from dflash_deploy.bench.protocols import PROTOCOLS
from dflash_deploy.bench.results import ResultFile, read_result, write_result
from dflash_deploy.bench.standalone import bench
from dflash_deploy.bench.statistics import compare
from dflash_deploy.cli import main
from dflash_deploy.errors import DeployError, ExitCode
from tests.compare.samples import result_of, run_of
from tests.simulator.conftest import FOUR_USERS, launching

from .sse_server import Script, serving


@dataclass(frozen=True)
class Ended:
    returncode: int
    stdout: str
    stderr: str


def tool(*arguments):
    """The whole command in this process, which spares half a second of imports each time."""
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", ["dflash-deploy", "bench", *map(str, arguments)]),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Ended(code, out.getvalue(), err.getvalue())


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
    assert (load["label"], load["users"]) == ("2 requests/s", 0)
    assert {"ttft_s", "latency_s", "waited_s"} <= load["tails"].keys()


def test_requests_at_given_moments(tmp_path):
    moments = tmp_path / "moments"
    moments.write_text("0\n0.1\n0.1\n\n0.35\n")
    arguments = ["--protocol", "latency", "--arrivals", moments, "--output-tokens", "44", "-q", "--json"]
    with serving(SOUND) as (url, _):
        ended = tool(url, *arguments, "--cold", "0")
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)["result"]
    (load,) = result["runs"][0]["loads"]
    assert (load["label"], load["users"], len(load["rounds"][0]["users"])) == ("4 given arrivals", 0, 4)
    assert load["rounds"][0]["wall_s"] >= 0.35
    assert result["workload"]["arrivals"] == "4 given in 0.35 s"
    for wrong, words in (("1\n0.5\n", "moments:2"), ("x", "'x'"), ("nan", "'nan'"), ("", "holds no moment")):
        moments.write_text(wrong)
        ended = tool("http://127.0.0.1:9", *arguments)
        assert ended.returncode == ExitCode.INVALID_INPUT
        assert words in ended.stderr


def test_two_live_servers_are_measured_in_turn(simulator):
    ended = tool(simulator, "--against", simulator, "--most-rounds", "4", "--output-tokens", "48")
    assert ended.returncode == 0, ended.stderr
    turns = [line[0] for line in ended.stderr.splitlines() if "cold" not in line]
    assert "".join(turns[:6]) == "ABBAAB"
    # Equal servers may be called different once in twenty times.
    assert ended.stdout.splitlines()[-1].startswith(("A and B: indistinguishable: keep the simpler", "A is "))


def test_a_slower_server_is_told_from_a_faster_one():
    slow = Script(pieces=SENTENCES, wait_s=0.2, usage={"prompt_tokens": 7, "completion_tokens": 44})
    with serving(SOUND) as (fast_url, _), serving(slow) as (slow_url, _):
        ended = tool(slow_url, "--against", fast_url, "--cold", "0", "--most-rounds", "5", "-q", "--json")
    assert ended.returncode == 0, ended.stderr
    assert "A is slower than B by" in ended.stderr
    found = json.loads(ended.stdout)["comparison"]
    assert found["verdict"] == "slower"
    assert found["low"] < found["ratio"] < found["high"] < 1


def test_where_one_of_two_tells_no_decode_speed_both_are_compared_by_all_tokens():
    usage = {"prompt_tokens": 7, "completion_tokens": 44}
    events = (json.dumps({"choices": [{"delta": {"content": text}}]}).encode() for text in SENTENCES)
    # As a proxy gives it that holds back all until the end; as long as the other in all.
    at_once = Script(
        raw=b"".join(b"data: %s\n\n" % event for event in events), pieces=(), first_wait_s=0.1, usage=usage
    )
    with serving(replace(SOUND, wait_s=0.05)) as (url, _), serving(at_once) as (proxy, _):
        protocol = changed("write-up-single", Changes(rounds=3, output_tokens=44))
        result, found = bench_both(Endpoint(url), Endpoint(proxy), protocol, most_rounds=3)
    assert [one.loads[0].rounds[-1].user_tokens_per_s is None for one in result.runs] == [False, True]
    assert found is not None
    speeds = [[one.tokens_per_s for one in run.loads[0].counted] for run in result.runs]
    assert found.ratio == compare(*speeds, paired=True).ratio
    assert all("tell no decode speed" in "".join(run.notes) for run in result.runs)


@pytest.mark.parametrize("users", ["1", "2"])
def test_a_server_that_claims_no_tokens_has_no_speed_to_compare(users):
    with serving(SOUND) as (url, _), serving(replace(SOUND, usage={"completion_tokens": 0})) as (other, _):
        ended = tool(url, "--against", other, "--users", users, "--output-tokens", "44", "-q")
    assert ended.returncode == ExitCode.FAILED
    assert "no tokens by usage" in ended.stdout
    assert "Traceback" not in ended.stderr


def test_a_faster_server_whose_answers_are_wrong_is_said_to_be_that():
    noise = replace(SOUND, pieces=("\ufffd\x00" * 30,) * 3, wait_s=0.005)
    with serving(SOUND) as (url, _), serving(noise) as (other, _):
        ended = tool(other, "--against", url, "--cold", "0", "--most-rounds", "3", "-q")
    assert ended.returncode == ExitCode.FAILED
    assert ended.stdout.splitlines()[-1].endswith("; but A is unfit")


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
        (["http://[::1"], ExitCode.USAGE, "http://127.0.0.1:30000"),
        (["--rate", "1"], ExitCode.USAGE, "goes in rounds"),
        (["--protocol", "latency", "--arrivals", "x", "--rounds", "3"], ExitCode.USAGE, "how many requests"),
        (["--users", "9" * 5000], ExitCode.USAGE, "write 4, or 1,2,4"),
        (["--input-tokens", "99"], ExitCode.USAGE, "context-ladder"),
        (["--protocol", "context-ladder", "--input-tokens", "9,x"], ExitCode.USAGE, "no lengths"),
        (["--protocol", "context-ladder", "--cold", "1"], ExitCode.USAGE, "no cold rounds"),
        (["--protocol", "latency", "--rate", "1", "--users", "4"], ExitCode.USAGE, "no number of users"),
        (["--against", "http://127.0.0.1:9", "--exam"], ExitCode.USAGE, "one server"),
    ],
)
def test_what_a_person_must_mend(arguments, code, words):
    ended = tool(*arguments)
    assert ended.returncode == code, ended.stderr
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("script", "words", "fix"),
    [
        (Script(status="401 Unauthorized", body=b"key"), "HTTP 401: key", "--api-key-file"),
        (Script(status="404 Not Found", body=b"no model"), "HTTP 404: no model", "--model"),
        (Script(status="308 There", body=b""), "HTTP 308", "points to"),
        (Script(body=b"<title>Open WebUI</title>"), "<title>Open WebUI</title>", "model server itself"),
    ],
)
def test_where_no_chat_is_to_be_had_one_is_told_what_to_mend(script, words, fix):
    with serving(script) as (url, _), pytest.raises(DeployError) as error:
        bench(Endpoint(url), changed("write-up-single", Changes()))
    assert words in error.value.message
    assert fix in error.value.fix


@pytest.mark.parametrize("task", ["tools", "long-context", "multi-turn"])
def test_answers_that_are_short_by_nature_are_not_forced_to_a_length(task):
    short = Script(pieces=('{"total": 3', "46.5}"), wait_s=0.01, usage={"completion_tokens": 8})
    with serving(short) as (url, seen):
        endpoint = Endpoint(url, engine="sglang")
        (run,) = bench(endpoint, changed("write-up-single", Changes(rounds=2, tasks=task))).runs
    assert (run.outcome, run.reason) == ("served", None)
    assert not any("not every answer" in note for note in run.notes)
    assert {body["ignore_eos"] for body in seen.bodies if "messages" in body} == {False}
    with serving(short) as (url, _):
        endpoint = Endpoint(url, engine="sglang")
        (run,) = bench(endpoint, changed("write-up-single", Changes(rounds=2, tasks="code"))).runs
    assert run.outcome == "unfit"


def test_a_server_that_refuses_extras_is_asked_plainly():
    with serving(replace(SOUND, plain_only=True)) as (url, seen):
        result = bench(Endpoint(url), changed("write-up-single", Changes(rounds=1, output_tokens=44)))
    (run,) = result.runs
    assert run.outcome == "served", run.reason
    assert "ignore_eos" in seen.bodies[0]
    assert all(not {"ignore_eos", "chat_template_kwargs"} & body.keys() for body in seen.bodies[1:])
    assert any("refuses what is not in OpenAI's interface" in note for note in run.notes)


def test_where_one_of_two_refuses_extras_both_are_asked_plainly():
    strict = replace(SOUND, plain_only=True, usage=None)
    with serving(SOUND) as (url, seen), serving(strict) as (strict_url, _):
        result, found = bench_both(
            Endpoint(url, engine="sglang"),
            Endpoint(strict_url),
            changed("write-up-single", Changes(rounds=2, cold=0, output_tokens=44)),
            most_rounds=3,
        )
    assert found is not None
    assert "ignore_eos" in seen.bodies[0]
    assert all("ignore_eos" not in body for body in seen.bodies[1:])
    for run in result.runs:
        assert run.outcome == "served", run.reason
        assert any("refuses what is not in OpenAI's interface" in note for note in run.notes)
    assert [any("does not count" in note for note in run.notes) for run in result.runs] == [False, True]


def test_a_server_that_refuses_everything_is_asked_twice_and_no_more():
    with serving(Script(status="400 Bad Request", body=b"no")) as (url, seen):
        result = bench(Endpoint(url), changed("write-up-single", Changes()))
    assert (result.runs[0].outcome, len(seen.bodies)) == ("unstable", 2)


def interrupted(tmp_path, number, *arguments):
    """What the command leaves when this signal comes after its first round."""
    out = tmp_path / "r.json"
    with serving(SOUND) as (url, seen):
        command = [sys.executable, "-m", "dflash_deploy", "bench", url, "--out", str(out), "--rounds", "999"]
        with subprocess.Popen(
            [*command, "--output-tokens", "44", *(url if word == "URL" else word for word in arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PATH": "/usr/bin:/bin"},
        ) as process:
            deadline = time.monotonic() + 60
            while seen.left < 12 and time.monotonic() < deadline:
                time.sleep(0.02)
            process.send_signal(number)
            said, err = process.communicate(timeout=60)
    return process.returncode, read_result(out), said, err


@pytest.mark.parametrize(
    ("number", "arguments"),
    [
        (signal.SIGINT, ()),
        (signal.SIGTERM, ("--protocol", "soak", "--seconds", "600")),
        (signal.SIGHUP, ("--protocol", "latency", "--rate", "20")),
    ],
)
def test_what_had_been_measured_is_kept_when_it_is_cut_short(tmp_path, number, arguments):
    code, result, said, err = interrupted(tmp_path, number, *arguments)
    assert code == ExitCode.INTERRUPTED, err
    assert "Traceback" not in err
    assert result.interrupted
    rows = sum(len(one.users) for load in result.runs[0].loads for one in load.rounds)
    assert 2 <= rows < 999
    assert "all figures measured" in said
    assert "cut short" in err


@pytest.mark.parametrize("arguments", [(), ("--against", "URL", "--most-rounds", "999")])
def test_a_first_level_survives_even_a_kill(tmp_path, arguments):
    code, result, _, _ = interrupted(tmp_path, signal.SIGKILL, *arguments)
    assert code == -signal.SIGKILL
    assert result.interrupted
    assert [one.name for one in result.runs[0].loads[0].rounds] == ["cold"]


def test_a_disk_without_room_costs_the_file_and_not_the_figures(tmp_path):
    out = tmp_path / "r.json"
    with serving(SOUND) as (url, _):
        command = [sys.executable, "-m", "dflash_deploy", "bench", url, "--rounds", "1", "--out", str(out)]
        ended = subprocess.run(
            ["bash", "-c", 'ulimit -f 0; exec "$@"', "bash", *command, "--output-tokens", "44"],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert ended.returncode == ExitCode.UNAVAILABLE
    assert "all figures measured" in ended.stdout
    assert f"error: {out}" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not out.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device here")
def test_progress_that_cannot_be_written_costs_no_figures():
    with serving(SOUND) as (url, _), Path("/dev/full").open("w") as full:
        command = [
            sys.executable,
            "-m",
            "dflash_deploy",
            "bench",
            url,
            "--rounds",
            "1",
            "--output-tokens",
            "44",
        ]
        ended = subprocess.run(
            command, check=False, stdout=subprocess.PIPE, stderr=full, text=True, timeout=60
        )
    assert ended.returncode == 0
    assert "all figures measured" in ended.stdout


def test_where_nothing_could_be_measured_the_exit_status_says_so():
    with serving(SOUND) as (url, _):
        ended = tool(url, "--protocol", "context-ladder")
    assert ended.returncode == ExitCode.FAILED
    assert "does not count a prompt's tokens" in ended.stdout


def test_more_requests_than_a_file_holds_are_not_listed(monkeypatch):
    monkeypatch.setattr("dflash_deploy.bench.record._MOST_ROWS", 3)
    with serving(SOUND) as (url, _):
        protocol = changed("throughput", Changes(users="2", rounds=2, output_tokens=44))
        (run,) = bench(Endpoint(url), protocol).runs
    (load,) = run.loads
    assert [one.users for one in load.rounds] == [[], [], []]
    assert load.rounds[0].tokens_per_s > 0
    assert not load.window
    assert any("not listed one by one" in note for note in run.notes)


def test_a_level_that_was_played_again_has_as_many_rounds(tmp_path):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for wait_s, out in zip((0.001, 0.02), files, strict=True):
        with serving(replace(SOUND, wait_s=wait_s)) as (url, _):
            protocol = changed("throughput", Changes(users="1,2", rounds=1, cold=0, output_tokens=44))
            write_result(out, bench(Endpoint(url), protocol))
    (run,) = read_result(files[0]).runs
    assert [(load.users, load.label) for load in run.loads] == [(1, "1 user"), (2, "2 users")]
    assert [one.name for one in run.loads[1].rounds] == ["2 users", "2 users, round 2", "2 users, round 3"]
    assert all(load.tails["ttft_s"].median > 0 for load in run.loads)
    ended = tool("compare", *files, "--json")
    assert ended.returncode == 0, ended.stderr
    one, two = json.loads(ended.stdout)["pairs"]
    assert (one["users"], two["users"], two["rounds"]) == (1, 2, 3)
    assert two["ratio"] > 1
    assert two["low"] > 0, "so many rounds tell a spread"


def test_two_files_side_by_side(tmp_path):
    a, b, other = (tmp_path / f"{name}.json" for name in "abc")
    write_result(a, result_of(run_of("bench", [103.0, 104.0, 105.0])))
    write_result(b, result_of(run_of("bench", [100.0, 101.0, 102.0])))
    write_result(other, result_of(run_of("bench", [100.0]), sha256="1" * 64))
    ended = tool("compare", a, b)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(
        "bench, one user, tokens/s a user: 104.0 and 101.0: "
        "the first is faster than the second by 3.0 % (95 % interval "
    )
    ended = tool("compare", a, other)
    assert ended.returncode == ExitCode.INVALID_INPUT
    assert "other prompts" in ended.stderr
    ended = tool("compare", a, other, "--anyway", "--json")
    assert ended.returncode == 0
    assert "warning: the two were asked different things" in ended.stderr
    assert json.loads(ended.stdout)["pairs"][0]["verdict"] == "indistinguishable"


def test_a_persons_file_says_how_long_answers_may_be(tmp_path):
    own = tmp_path / "mine.jsonl"
    own.write_text('{"prompt": "a", "max_tokens": 17}\n{"prompt": "b", "max_tokens": 44}\n')
    hashes = []
    for more, wanted, forced in ((), [17, 44], False), (("--output-tokens", "30"), [30, 30], True):
        with serving(SOUND) as (url, seen):
            ended = tool(
                url,
                "--workload",
                own,
                "--cold",
                "0",
                "--rounds",
                "2",
                "-q",
                "--json",
                "--no-check-output",
                *more,
            )
        result = json.loads(ended.stdout)["result"]
        asked = [body for body in seen.bodies if "messages" in body]
        assert [body["max_tokens"] for body in asked] == wanted
        assert all(body["ignore_eos"] is forced for body in asked)
        assert any("as the file says" in note for note in result["runs"][0]["notes"]) is not forced
        assert result["workload"]["output_tokens"] == max(wanted)
        hashes.append(result["workload"]["sha256"])
    assert hashes[0] != hashes[1]


def test_no_file_is_written_of_nothing_and_that_is_said(tmp_path):
    with serving(Script(status="503 Service Unavailable", body=b"loading")) as (url, _):
        ended = tool(url, "--rounds", "1", "-q", "--out", tmp_path / "r.json")
    assert ended.returncode == ExitCode.FAILED
    assert "is not written: nothing was measured" in ended.stderr
    assert not list(tmp_path.iterdir())


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
    assert changed("throughput", Changes(rounds=2)).passes > 1
    assert other.passes == changed("throughput", Changes(open_loop=True)).passes == 1
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

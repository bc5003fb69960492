"""The command with the simulator as its server: a process of its own, as SGLang would be."""

import re
import signal
import socket
import sys

import pytest

from dflash_deploy.errors import ExitCode

from .conftest import wait_for


def test_a_study_from_profile_to_command(tool):
    ended = tool.simulate("--trials", "4", "--name", "first", "--seed", "5")
    assert ended.code == 0, ended.err
    result = ended.result
    assert ended.out.count("\n") == 1, "with --json, stdout holds the object alone"
    assert result["study"] == "first"
    assert result["simulated"] is result["best"]["simulated"] is True
    assert result["ended_by"] in ("trials", "gain")
    launched = [trial for trial in result["trials"] if trial["launched"]]
    assert 2 <= len(launched) <= 4
    assert launched[0]["source"] == "known:hand-tuned"

    best = result["best"]
    assert best["spread"]["low"] <= best["objective"] <= best["spread"]["high"]
    assert best["measured"]["users"] == 2
    assert best["measured"]["vram_total_mib"] == 32607
    assert best["predicted"]["peak_mib"] > 20_000
    assert best["command"].startswith("python -m sglang.launch_server --model-path ")
    assert "--max-total-tokens 8192" in best["command"]
    assert result["next_command"] == "dflash-deploy emit first"
    (baseline,) = result["baselines"]
    assert (baseline["name"], baseline["trial"]) == ("hand-tuned", 1)
    assert baseline["gain"]["median"] >= 0
    assert best["objective"] >= baseline["objective"] or not baseline["distinguishable"]

    folder = tool.studies / "first" / "trials" / "0001"
    record = tool.trials("first")[1]
    assert "fired up" in (folder / "server.log").read_text()
    assert record["argv"][1:3] == ["-m", "dflash_deploy.simulator"]
    assert record["env"]["DFLASH_SIM_SEED"] == "5"
    assert record["boot"]["kv_tokens"] == 8192
    assert record["measured"]["accept_length"] > 1
    assert "trial 1: known:hand-tuned" in ended.err
    assert "\x1b[" not in ended.err
    assert "best so far" in ended.err
    assert "(simulated)" in ended.err


def test_on_a_terminal_a_table_grows(tool):
    command = [word for word in tool.command("--trials", "2", "--name", "s") if word != "--json"]
    shown = tool.on_terminal(*command)
    text = shown.out
    assert shown.code == 0, text
    for word in (
        "s (simulated)",
        "outcome",
        "served",
        "best so far",
        "hand-tuned",
        "round 2/2",
    ):
        assert word in text
    # A stage that is over before anybody looks is not shown; all of them never are.
    assert re.search("loading|capturing|warming up", text)
    assert "command:" in text
    assert "next: dflash-deploy emit s" in text


def test_a_finished_study_is_not_launched_again_and_a_larger_one_goes_on(tool):
    assert tool.simulate("--trials", "2", "--name", "s").code == 0
    before = tool.trials("s")
    again = tool.run("tune", "--resume", "--trials", "2", "--least-gain", "0", "--json")
    assert again.code == 0
    assert tool.trials("s") == before
    more = tool.run("tune", "--resume", "s", "--trials", "3", "--least-gain", "0", "--json")
    assert more.code == 0
    after = tool.trials("s")
    assert {number: after[number] for number in before} == before
    assert sum(bool(record["argv"]) for record in after.values()) == 3
    assert len({str(sorted(r["flags"].items())) for r in after.values()}) == len(after)


def test_ctrl_c_once_lets_the_running_trial_end(tool):
    process = tool.start(*tool.command("--trials", "6", "--least-gain", "0", "--name", "s", scale=40))
    wait_for(lambda: 1 in tool.trials("s") and tool.servers())
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED, err
    assert "stopping when this trial has ended" in err
    assert '"ended_by":"interrupted"' in out
    assert not tool.servers()
    assert {record["outcome"] for record in tool.trials("s").values()} == {"served"}


@pytest.mark.parametrize(
    "numbers", [(signal.SIGINT,) * 3, (signal.SIGTERM,), (signal.SIGHUP, signal.SIGINT)], ids=str
)
def test_signals_stop_the_server_and_keep_what_has_ended(tool, numbers):
    process = tool.start(*tool.command("--trials", "6", "--name", "s", scale=40))
    wait_for(lambda: 1 in tool.trials("s") and tool.servers())
    err = ""
    for number in numbers:
        process.send_signal(number)
        # Two of a kind may be delivered as one, unless the first has been heard.
        while numbers.count(signal.SIGINT) > 1 and "stopping when this trial has ended" not in err:
            line = process.stderr.readline()
            assert line, err
            err += line
    err += process.stderr.read()
    out = process.stdout.read()
    process.wait(60)
    assert process.returncode == ExitCode.INTERRUPTED, err
    assert not tool.servers()
    assert "stopped by hand" in err
    assert "Traceback" not in err
    assert '"ended_by":"interrupted"' in out
    records = tool.trials("s")
    assert records[1]["outcome"] == "served"
    assert records[max(records)]["outcome"] == "interrupted"


def test_a_killed_tuner_leaves_no_server_and_its_trial_is_done_again(tool):
    process = tool.start(*tool.command("--trials", "3", "--least-gain", "0", "--name", "s", scale=40))
    wait_for(lambda: 1 in tool.trials("s") and tool.servers())
    process.kill()
    process.communicate(timeout=30)
    kept = tool.trials("s")
    begun = [path for path in (tool.studies / "s" / "trials").glob("*") if not (path / "trial.json").exists()]
    assert len(begun) == 1

    ended = tool.run("tune", "--resume", "--trials", "3", "--least-gain", "0", "--json")
    assert ended.code == 0, ended.err
    records = tool.trials("s")
    assert {number: records[number] for number in kept} == kept
    cut = records[int(begun[0].name)]
    assert cut["outcome"] == "interrupted"
    redone = [r for r in records.values() if r["flags"] == cut["flags"] and r["outcome"] != "interrupted"]
    assert len(redone) == 1
    assert sum(bool(record["argv"]) for record in records.values()) == 3
    assert not tool.servers()


def test_two_tuners_on_one_study(tool):
    first = tool.start(*tool.command("--trials", "3", "--name", "s", scale=20))
    wait_for(tool.servers)
    second = tool.run("tune", "--resume", "--name", "s")
    assert second.code == ExitCode.UNAVAILABLE
    assert "another dflash-deploy works on s" in second.err
    assert str(first.pid) in second.err
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)


@pytest.mark.parametrize(
    ("fault", "outcome", "said"),
    [
        ("garbage", "bad-output", "mojibake"),
        ("wrong-usage", "bad-output", "wrong-count"),
        ("die:decode-capture", "failed", "decode-capture"),
        ("die-after:3", "unstable", "illegal memory access"),
    ],
)
def test_when_nothing_serves_the_reasons_are_told(tool, fault, outcome, said):
    ended = tool.simulate("--trials", "1", "--name", "s", DFLASH_SIM_FAULT=fault)
    assert ended.code == ExitCode.FAILED, ended.err
    (trial,) = ended.result["trials"]
    assert trial["outcome"] == outcome
    assert said in trial["reason"]
    assert not trial["feasible"]
    assert trial["objective"] is None
    assert ended.result["best"] is None
    assert "no configuration served within the limits" in ended.err
    assert f"what to change ({outcome})" in ended.err


def test_a_limit_nobody_can_keep(tool):
    limit = "objective.constraints.user_tokens_per_s.min=100000"
    ended = tool.simulate("--trials", "1", "--set", limit)
    assert ended.code == ExitCode.FAILED
    (trial,) = ended.result["trials"]
    assert trial["outcome"] == "infeasible"
    assert 0.9 < trial["violations"]["user_tokens_per_s"] < 1
    assert "wanted at least 100000" in trial["reason"]
    assert trial["objective"] > 0


def test_answers_that_end_with_the_pool_are_short_and_not_wrong(tool):
    # A hair above the least share that can be sized: a pool of a few hundred tokens.
    tight = "{mem-fraction-static: 0.8325, max-running-requests: 2, speculative-num-draft-tokens: 8}"
    ended = tool.simulate(
        *("--trials", "1", "--name", "s", "--set", "search={mem-fraction-static: {choices: [0.8325]}}"),
        *("--set", f"known=[{{name: tight, source: made up, flags: {tight}}}]"),
    )
    (trial,) = ended.result["trials"]
    assert trial["launched"]
    assert "wrong-count" in str(tool.trials("s")[1]["measured"]["faults"])
    assert trial["outcome"] == "infeasible"
    assert "context_tokens" in trial["violations"]
    assert trial["objective"] is None


def test_what_the_plan_refuses_is_not_launched(tool):
    ended = tool.simulate(
        *("--trials", "4", "--least-gain", "0"),
        *("--set", "search.mem-fraction-static={low: 0.60, high: 0.92, step: 0.32}"),
    )
    assert ended.code == 0, ended.err
    tried = ended.result["trials"]
    assert len(tried) == 4
    assert all(trial["launched"] and trial["outcome"] == "served" for trial in tried)
    assert {trial["flags"]["mem-fraction-static"] for trial in tried} == {0.92}


def test_a_study_stops_when_nothing_is_worth_a_launch_and_says_so(tool):
    ended = tool.simulate("--trials", "20")
    assert ended.code == 0, ended.err
    assert ended.result["ended_by"] == "gain"
    assert len(ended.result["trials"]) < 10
    assert "less than the noise" in ended.err


def test_a_target_that_is_met_ends_the_study(tool):
    ended = tool.simulate("--trials", "20", "--target", "100", "--name", "s")
    assert ended.code == 0, ended.err
    assert ended.result["ended_by"] == "target"
    # One that is good enough, and its proof.
    assert [trial["source"] for trial in ended.result["trials"]] == ["known:hand-tuned", "proof"]
    (proof,) = (trial["proof"] for trial in tool.trials("s").values() if trial["proves"])
    assert proof["problem"] is None
    assert proof["kv_tokens"] == 8192
    assert 0.9 * 1024 < proof["context_tokens"] <= 1024
    assert proof["free_mib"] > 0
    assert not proof["exam"]["faults"]
    assert proof["exam"]["asked"] == 0, "a simulator's words mean nothing"
    assert proof["exam"]["repeated_same"] == proof["exam"]["repeated"] == 3
    assert "the target was reached" in ended.err


def test_a_small_space_ends_when_it_is_tried_out(tool):
    ended = tool.simulate(
        *("--trials", "9", "--least-gain", "0"),
        *("--set", "search={max-running-requests: {choices: [2, 3]}}"),
        *("--set", "flags.mem-fraction-static=0.92", "--set", "known=[]"),
    )
    assert ended.result["ended_by"] == "exhausted", ended.err
    assert [trial["source"] for trial in ended.result["trials"]] == ["search", "search", "proof"]


def test_no_time_is_no_trial(tool):
    ended = tool.simulate("--minutes", "0")
    assert ended.code == ExitCode.FAILED
    assert ended.result["ended_by"] == "minutes"
    assert ended.result["trials"] == []


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--simulate", "rtx-6060"), ExitCode.MISSING, "rtx-5090"),
        ((), ExitCode.USAGE, "profile list"),
        (("no-such-profile",), ExitCode.MISSING, "no-such-profile"),
        (("PROFILE",), ExitCode.MISSING, "--python"),
        (("PROFILE", "--python", "/nowhere/python"), ExitCode.MISSING, "/nowhere/python"),
        (("PROFILE", "--python", sys.executable), ExitCode.MISSING, "sglang"),
        (("PROFILE", "--simulate", "rtx-5090", "--set", "flags.no-such-flag=1"), 3, "no-such-flag"),
        (("PROFILE", "--simulate", "rtx-5090", "--set", "workload.users=none"), 3, "users"),
        (("PROFILE", "--simulate", "rtx-5090", "--name", "../up"), ExitCode.USAGE, "cannot name a study"),
        (("--resume",), ExitCode.MISSING, "no study"),
        (("--resume", "gone"), ExitCode.MISSING, "no study"),
        (("--resume", "--simulate", "rtx-5090"), ExitCode.USAGE, "name the study alone"),
        (("PROFILE", "--profile", "x"), ExitCode.USAGE, "once"),
        (("PROFILE", "--simulate", "rtx-5090", "--host", "192.0.2.1"), ExitCode.UNAVAILABLE, "192.0.2.1"),
        (("--trials", "0"), ExitCode.USAGE, "--trials"),
        (("PROFILE", "--simulate", "rtx-5090", "--target", "nan"), ExitCode.USAGE, "--target"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_launched(tool, arguments, code, said):
    ended = tool.run("tune", *(str(tool.profile) if word == "PROFILE" else word for word in arguments))
    assert ended.code == code, ended.err
    assert said.lower() in ended.err.lower()
    assert "Traceback" not in ended.err
    assert not tool.studies.exists()


def test_a_taken_port_is_told_and_nothing_is_launched(tool):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = tool.simulate("--trials", "2", "--name", "s", "--port", str(port))
    assert ended.code == ExitCode.UNAVAILABLE
    assert f"port {port}" in ended.err
    assert not tool.studies.exists()


@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        ('exec "$@" >/dev/full', ExitCode.UNAVAILABLE, "progress cannot be shown: No space left"),
        ('"$@" | head -1 >&2; exit "${PIPESTATUS[0]}"', ExitCode.FAILED, "study s in"),
        ('exec "$@" --minutes 0 >&-', ExitCode.FAILED, ""),
    ],
)
def test_output_that_nobody_takes(tool, shell, code, said):
    command = [word for word in tool.command("--trials", "1", "--name", "s") if word != "--json"]
    ended = tool.wrapped(shell, *command)
    assert ended.code == code, ended.err
    assert said in ended.err
    assert "Traceback" not in ended.err
    assert "cannot be written" not in ended.err


def test_a_full_disk_is_told_and_what_has_ended_is_kept(tool):
    assert tool.simulate("--trials", "1", "--name", "s").code == 0
    before = tool.trials("s")
    # A limit on the size of files refuses writes as a full disk does, and needs no disk to fill.
    ended = tool.wrapped('ulimit -f 1; exec "$@"', "tune", "--resume", "--trials", "3")
    assert ended.code == ExitCode.UNAVAILABLE, ended.err
    assert "Traceback" not in ended.err
    assert "error:" in ended.err
    assert tool.trials("s") == before
    assert tool.run("tune", "--resume", "--trials", "2").code == 0


def test_a_winner_that_does_not_last_is_out_and_the_next_one_is_proven(tool):
    # The server dies of its ninth answer: a trial has six, its proof some more.
    ended = tool.simulate("--trials", "6", "--name", "s", DFLASH_SIM_FAULT="die-after:8")
    records = tool.trials("s")
    proofs = [record for record in records.values() if record["proves"]]
    assert len(proofs) >= 2
    assert all(record["outcome"] == "unstable" for record in proofs)
    assert all(record["proof"]["problem"] for record in proofs)
    assert len({record["proves"] for record in proofs}) == len(proofs), "each of another winner"
    best = ended.result["best"]
    assert best is None or best["trial"] not in {record["proves"] for record in proofs}


def test_a_winner_whose_answers_go_wrong_is_out_and_the_next_one_is_proven(tool):
    # Sound while it is measured, and after long use no more.
    ended = tool.simulate("--trials", "6", "--name", "s", DFLASH_SIM_FAULT="garbage-after:8")
    proofs = [record for record in tool.trials("s").values() if record["proves"]]
    assert len(proofs) >= 2
    assert len({record["proves"] for record in proofs}) == len(proofs), "each of another winner"
    for record in proofs:
        assert record["outcome"] == "bad-output"
        assert not record["feasible"]
        assert any(fault.startswith("mojibake:") for fault in record["proof"]["exam"]["faults"])
        assert "for example" in record["reason"], "an example is kept"
    best = ended.result["best"]
    assert best is None or best["trial"] not in {record["proves"] for record in proofs}


def test_one_launch_measures_other_numbers_of_users_too(tool):
    ended = tool.simulate("--trials", "1", "--name", "s", "--set", "measure.levels=[1, 2, 3]")
    assert ended.code == 0, ended.err
    (record,) = tool.trials("s").values()
    # Two are the workload's own, and three more than the server takes at once.
    assert [level["users"] for level in record["levels"]] == [1]
    assert (
        record["levels"][0]["total_tokens_per_s"]["median"]
        < record["measured"]["total_tokens_per_s"]["median"]
    )


def test_what_loses_by_far_is_measured_in_full_all_the_same(tool):
    ended = tool.simulate(
        *("--trials", "3", "--least-gain", "0", "--name", "s"),
        *("--set", "search={speculative-num-draft-tokens: {choices: [2, 8]}}", "--set", "known=[]"),
        *("--set", "flags.mem-fraction-static=0.92", "--set", "flags.max-running-requests=2"),
    )
    assert ended.code == 0, ended.err
    rounds = {
        record["flags"]["speculative-num-draft-tokens"]: record["measured"]["rounds"]
        for record in tool.trials("s").values()
        if not record["proves"] and "speculative-num-draft-tokens" in record["flags"]
    }
    assert rounds == {8: 2, 2: 2}

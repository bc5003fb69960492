"""The command with the simulator as its servers: processes of their own, as SGLang's would be."""

import json
import resource
import signal
from dataclasses import replace

import pytest

from dflash_deploy.bench.results import read_result
from dflash_deploy.compare.records import (
    ArmRecord,
    ComparisonRecord,
    claim,
    find,
    read_comparison,
    read_run,
    run_path,
)
from dflash_deploy.compare.running import Wanted, begin, run_all, schedule
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.tune.launching import Simulated
from dflash_deploy.tune.opening import Place
from dflash_deploy.tune.signals import Asked
from dflash_deploy.tune.study import alone_on
from tests.tune.conftest import Tool, wait_for


def command(tool: Tool, *arguments, scale=400):
    card = ("--simulate", "rtx-5090", "--time-scale", str(scale))
    return ("compare", "--profile", tool.profile, *card, *arguments)


def folder_of(tool, name):
    return tool.home / "state" / "dflash-deploy" / "comparisons" / name


def test_methods_side_by_side(tool):
    out = tool.home / "result.json"
    ended = tool.run(
        *command(tool, "--methods", "none,dflash", "--json", "--name", "c", "--out", out, "--redact")
    )
    assert ended.code == 0, ended.err
    assert ended.out.count("\n") == 1
    found = json.loads(ended.out)
    plain, dflash = found["summary"]
    assert (plain["method"], dflash["method"]) == ("none", "dflash")
    assert found["kind"] == "simulated"
    assert dflash["verdict"] == "faster"
    assert dflash["speed_up"] > 1.5
    assert dflash["accept_length"] > 1
    assert dflash["same_text"] == dflash["compared_text"] > 0
    assert 0 < dflash["vram_used_mib"] < dflash["vram_total_mib"]
    assert "dflash (2/2): 2 users, round 2" in ended.err

    result = read_result(out)
    assert result.redacted
    assert result.machine.card == "rtx-5090"
    assert str(tool.home) not in out.read_text()
    (run,) = [run for run in result.runs if run.name == "dflash"]
    assert run.flags["speculative-algorithm"] == "DFLASH"
    assert [one.name for one in run.loads[0].rounds] == ["cold", "round 1", "round 2"]
    assert {user.output_tokens for one in run.loads[0].rounds for user in one.users} == {256}
    assert (folder_of(tool, "c") / "runs" / "1-dflash" / "server.log").exists()

    again = tool.run("compare", "--resume", "--name", "c", "--format", "csv")
    assert again.code == 0, again.err
    assert "done before" in again.err
    assert again.out.startswith("kind,method,")


def test_what_had_ended_is_kept_when_it_is_cut_short(tool):
    with tool.start(
        *command(tool, "--methods", "none,ngram", "--name", "c", "--no-exam", scale=20)
    ) as process:
        first = run_path(folder_of(tool, "c"), "none", 1)
        wait_for(first.exists)
        wait_for((first.parent / "1-ngram" / "server.log").exists)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=100)
    assert process.returncode == ExitCode.INTERRUPTED, err
    assert "none" in out
    assert "ngram" not in out
    assert "--resume --name c" in err
    assert tool.servers() == []
    kept = first.read_text()

    record = read_comparison(folder_of(tool, "c"))
    sped_up = record.model_copy(update={"time_scale": 400.0})
    (folder_of(tool, "c") / "comparison.json").write_text(sped_up.model_dump_json())
    ended = tool.run("compare", "--resume", "--json")
    assert ended.code == 0, ended.err
    assert [row["method"] for row in ended.result["summary"]] == ["none", "ngram"]
    assert first.read_text() == kept


def test_a_launch_that_has_been_measured_is_kept_whatever_comes(tool):
    """Ctrl-C while its server stops; then a disk that has room for nothing more."""
    with tool.start(*command(tool, "--methods", "none,ngram", "--name", "c", "--no-exam")) as process:
        while "none (1/2): stopping" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        # By the file that has read until here: of what is in its buffer `communicate` knows nothing.
        err = process.stderr.read()
    assert process.returncode == ExitCode.INTERRUPTED, err
    assert "none (1/2): served" in err
    assert "ngram (2/2): served" not in err
    assert "--resume --name c" in err
    assert run_path(folder_of(tool, "c"), "none", 1).exists()

    # A limit on the size of files refuses writes as a full disk does, and needs no disk to fill.
    ended = tool.wrapped('ulimit -f 100; exec "$@"', "compare", "--resume", "--json")
    assert ended.code == ExitCode.UNAVAILABLE, ended.err
    assert [row["method"] for row in ended.result["summary"]] == ["none"]
    assert "cannot be written: File too large" in ended.err
    assert "then dflash-deploy compare --resume --name c" in ended.err
    assert tool.servers() == []


def test_methods_that_do_not_start_or_answer_rubbish_are_results(tool):
    ended = tool.run(*command(tool, "--methods", "none", "--json", "--no-exam"), DFLASH_SIM_FAULT="garbage")
    assert ended.code == ExitCode.FAILED
    (run,) = ended.result["result"]["runs"]
    assert run["outcome"] == "unfit"
    assert "mojibake" in run["reason"]
    ended = tool.run(*command(tool, "--methods", "none", "--json", "--no-exam"), DFLASH_SIM_FAULT="die:pools")
    assert ended.code == ExitCode.FAILED
    (run,) = ended.result["result"]["runs"]
    assert run["outcome"] == "failed"
    assert run["loads"] == []


def test_what_a_person_must_mend_is_said_before_any_launch(tool):
    ended = tool.run(*command(tool, "--set", "flags.no-such-flag=1"))
    assert ended.code not in (0, ExitCode.FAILED)
    assert "no-such-flag" in ended.err
    assert "Traceback" not in ended.err
    assert not folder_of(tool, "").exists()


def test_names_are_names_and_each_is_taken_once(tool, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tool.home / "state"))
    assert claim("a", "p") == folder_of(tool, "a")
    for wrong in ("../x", "", "-x"):
        with pytest.raises(DeployError):
            claim(wrong, "p")
    assert claim(None, "p").name.startswith("p-")
    assert claim(None, "p") != claim(None, "p")
    # Whoever claimed it was killed before it was a comparison.
    (folder_of(tool, "a") / ".comparison.json.x1y2z3").touch()
    assert claim("a", "p") == folder_of(tool, "a")
    (folder_of(tool, "a") / "comparison.json").touch()
    (folder_of(tool, "a").parent / "b").touch()
    for taken in ("a", "b"):
        with pytest.raises(DeployError, match="already"):
            claim(taken, "p")


def test_a_comparison_that_could_not_be_begun_leaves_its_name_free(tool, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tool.home / "state"))
    wanted = Wanted(str(tool.profile), ("none",), simulate=Simulated("rtx-5090", 0, 400.0), name="c")
    place = Place(None, "127.0.0.1", None)
    # Nor does what somebody killed has left there hide why.
    folder_of(tool, "c").mkdir(parents=True)
    (folder_of(tool, "c") / ".comparison.json.x1y2z3").touch()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            begin(wanted, place)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    folder, _, _ = begin(wanted, place)
    assert folder == folder_of(tool, "c")


def test_a_card_that_a_tuner_works_on_is_left_to_it(tool, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tool.home / "state"))
    wanted = Wanted(str(tool.profile), ("none",), simulate=Simulated("rtx-5090", 0, 400.0), name="c")
    folder, record, rig = begin(wanted, Place(None, "127.0.0.1", None))
    told = []
    with alone_on("GPU-1"), pytest.raises(DeployError, match="works on this card") as refused:
        run_all(folder, record, replace(rig, card="GPU-1"), told.append, Asked())
    assert refused.value.fix == "wait for it, then dflash-deploy compare --resume --name c"
    assert told == []


def test_nothing_to_go_on_with(tool, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tool.home / "state"))
    with pytest.raises(DeployError, match="no comparison") as error:
        find(None)
    assert error.value.exit_code == ExitCode.MISSING


def test_damaged_records_are_told_with_what_helps(tmp_path):
    for name, read, fix in (
        ("comparison.json", lambda path: read_comparison(path.parent), "begin anew"),
        ("1-none.json", read_run, "done again"),
    ):
        (tmp_path / name).write_text('{"name": ')
        with pytest.raises(DeployError, match=name) as error:
            read(tmp_path / name)
        assert fix in (error.value.fix or "")


def test_every_other_repeat_turns_the_order_about():
    record = ComparisonRecord.model_construct(
        arms=[ArmRecord(method="none", flags={}), ArmRecord(method="dflash", flags={})], repeats=3
    )
    order = [(arm.method, repeat) for arm, repeat in schedule(record)]
    assert order == [
        ("none", 1),
        ("dflash", 1),
        ("dflash", 2),
        ("none", 2),
        ("none", 3),
        ("dflash", 3),
    ]

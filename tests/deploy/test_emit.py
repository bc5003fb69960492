"""``dflash-deploy emit`` as a person runs it, on study folders written as tune writes them."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dflash_deploy.bench.measurement import Measurement, Spread
from dflash_deploy.paths import state_dir
from dflash_deploy.profile.load import load_profile
from dflash_deploy.tune.records import StudyRecord, TrialRecord, trial_folder, write_record
from tests.tool import run_tool

from . import systemd_syntax as systemd

_NOW = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)


def measurement(tokens_per_s: float) -> Measurement:
    spread = Spread(tokens_per_s, tokens_per_s, tokens_per_s)
    time_s = Spread(0.2, 0.2, 0.3)
    return Measurement(1, 1, spread, spread, time_s, time_s, 0.3, 1.0, 100, 4.0, 29076, 32607)


def trial(number: int, tokens_per_s: float | None, **changes: object) -> TrialRecord:
    flags = {
        "model-path": "org/model",
        "mem-fraction-static": 0.8 + number / 100,
        "served-model-name": "a 100% $x",
    }
    served = tokens_per_s is not None
    given = {
        "number": number,
        "source": "search",
        "flags": flags,
        "argv": ["/env/bin/python", "-m", "x"],
        "env": {},
        "outcome": "served" if served else "failed",
        "reason": None if served else "out of memory",
        "measured": measurement(tokens_per_s) if served else None,
        "objective": tokens_per_s,
        "feasible": served,
        "started": _NOW,
        "wall_s": 1.0,
    }
    return TrialRecord(**{**given, **changes})


def write_study(
    folder: Path, *trials: TrialRecord, simulated: bool = False, overrides: tuple[str, ...] = ()
) -> Path:
    profile = load_profile("rtx5090-single-user", overrides=overrides)
    record = StudyRecord(
        name=folder.name, created=_NOW, tool_version="0", simulated=simulated, seed=0, card="rtx-5090",
        engine_version="0.5.23", profile=profile,
    )  # fmt: skip
    write_record(folder / "study.json", record)
    for one in trials:
        write_record(trial_folder(folder, one.number) / "trial.json", one)
    return folder


@pytest.fixture
def study() -> Path:
    return write_study(state_dir() / "studies" / "mine", trial(0, 150.0), trial(1, 207.5), trial(2, None))


def emit(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_tool("emit", *arguments)


def command_of(unit: str) -> list[str]:
    return systemd.engine(systemd.command(systemd.settings(unit)["ExecStart"][0]))


def test_the_best_trial_of_the_latest_study_is_printed(study: Path):
    done = emit()
    assert (done.returncode, done.stderr) == (0, "")
    command = command_of(done.stdout)
    assert command[:3] == ["/env/bin/python", "-m", "sglang.launch_server"]
    assert command[command.index("--mem-fraction-static") + 1] == "0.81"
    assert command[command.index("--served-model-name") + 1] == "a 100% $x"
    assert command[command.index("--port") + 1] == "30000"
    assert "# 1 at once: 207.5 tokens/s in all" in done.stdout
    assert "(measured on rtx-5090)" in done.stdout
    assert "SIMULATED" not in done.stdout


@pytest.mark.parametrize("named", ["mine", "folder"])
def test_a_study_and_a_trial_can_be_named(study: Path, named: str):
    done = emit(study if named == "folder" else named, "--trial", 0, "--python", "/opt/e/bin/python")
    command = command_of(done.stdout)
    assert command[0] == "/opt/e/bin/python"
    assert command[command.index("--mem-fraction-static") + 1] == "0.8"


def test_a_simulated_study_gives_the_real_engines_command_and_says_what_it_is(tmp_path: Path):
    argv = [sys.executable, "-m", "dflash_deploy.simulator"]
    write_study(
        tmp_path / "s", trial(0, 150.0, argv=argv, env={"DFLASH_SIM_CARD": "rtx-5090"}), simulated=True
    )
    done = emit(tmp_path / "s")
    assert done.returncode == 0
    assert command_of(done.stdout)[:3] == ["/opt/dflash-deploy/env/bin/python", "-m", "sglang.launch_server"]
    assert "DFLASH_SIM" not in done.stdout
    assert "# SIMULATED: never run on a card" in done.stdout
    assert "(simulated rtx-5090)" in done.stdout
    assert "measured" not in done.stdout

    refused = emit(tmp_path / "s", "--out", tmp_path / "x.service")
    assert refused.returncode == 2
    assert "--allow-simulated" in refused.stderr
    assert not (tmp_path / "x.service").exists()
    assert emit(tmp_path / "s", "--out", tmp_path / "x.service", "--allow-simulated").returncode == 0
    assert (tmp_path / "x.service").read_text() == done.stdout


def test_a_model_without_a_public_place_is_named_as_a_gap(tmp_path: Path):
    write_study(tmp_path / "s", trial(0, 150.0, flags={"model-path": "tiny-random"}), simulated=True)
    assert "# --model-path tiny-random: everyone makes this model" in emit(tmp_path / "s").stdout


def test_a_file_is_shown_written_and_replaced_only_on_demand(study: Path, tmp_path: Path):
    target = tmp_path / "new"
    target.mkdir()
    unit = target / "dflash-sglang-qwen3-8-27b.service"
    shown = emit("--out", target, "--dry-run")
    assert f"+++ {unit}" in shown.stdout
    assert list(target.iterdir()) == []
    assert emit("--out", target).returncode == 0
    first = unit.read_text()
    assert emit("--out", target).returncode == 0
    assert "+ --mem" not in emit("--out", target, "--dry-run").stdout

    refused = emit("--out", target, "--trial", 0)
    assert refused.returncode == 5
    assert unit.read_text() == first
    changed = emit("--out", target, "--trial", 0, "--dry-run").stdout
    assert "-  --mem-fraction-static 0.81" in changed
    assert "+  --mem-fraction-static 0.8" in changed
    assert emit("--out", target, "--trial", 0, "--force").returncode == 0
    assert unit.with_name(f"{unit.name}.previous").read_text() == first


def test_a_unit_for_ones_own_manager_has_no_user_and_none_of_the_machines_hardening(study: Path):
    unit = systemd.settings(emit("--user").stdout)
    assert unit["WantedBy"] == ["default.target"]
    assert not {"User", "DynamicUser", "ProtectSystem"} & set(unit)


def test_the_account_is_the_profiles_or_the_one_given(tmp_path: Path):
    write_study(tmp_path / "s", trial(0, 1.0), overrides=("service.user=serve",))
    assert systemd.settings(emit(tmp_path / "s").stdout)["User"] == ["serve"]
    assert systemd.settings(emit(tmp_path / "s", "--run-as", "me").stdout)["User"] == ["me"]


def test_an_open_address_goes_with_its_key_file(tmp_path: Path):
    overrides = ("service.host=0.0.0.0", "service.api_key_file=/etc/dflash/key.yaml")
    write_study(tmp_path / "k", trial(0, 1.0), overrides=overrides)
    assert "LoadCredential=engine.yaml:/etc/dflash/key.yaml" in emit(tmp_path / "k").stdout


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["no-such"], 4, "no study 'no-such'"),
        (["/no/such/folder"], 4, "no study"),
        ([".."], 4, "no study"),
        (["mine", "--trial", 9], 4, "no trial 9"),
        (["mine", "--trial", 2], 1, "out of memory"),
        (["mine", "--python", 'a"b/python'], 3, 'path holds "'),
        (["mine", "--python", ""], 2, "expected a path"),
        (["mine", "--out", ""], 2, "expected a path"),
        (["mine", "--out", "~nobody-of-this-name/x"], 2, "no such home folder"),
        (["mine", "--dry-run"], 2, "--out FILE"),
        (["mine", "--force"], 2, "--out FILE"),
        (["mine", "--user", "--run-as", "me"], 2, "leave out --run-as"),
        ([""], 2, "expected a path"),
        (["mine", "--run-as", "root\nx"], 3, "user's name"),
    ],
)
def test_what_cannot_be_had_is_one_clear_message(study: Path, arguments, status: int, said: str):
    done = emit(*arguments)
    assert done.returncode == status
    assert "rror: " in done.stderr
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_python_is_named_from_where_the_command_is_run(study: Path):
    assert command_of(emit("--python", "env/bin/python").stdout)[0] == str(Path.cwd() / "env/bin/python")


def test_a_folder_that_lies_here_does_not_stand_for_a_study_so_named(
    study: Path, tmp_path: Path, monkeypatch
):
    write_study(tmp_path / "mine", trial(0, 1.0, argv=["/foreign/python"]))
    monkeypatch.chdir(tmp_path)
    assert command_of(emit("mine").stdout)[0] == "/env/bin/python"
    assert command_of(emit("./mine").stdout)[0] == "/foreign/python"


def test_a_unit_is_utf_8_whatever_the_terminal_is(tmp_path: Path, monkeypatch):
    write_study(tmp_path / "s", trial(0, 1.0, argv=["/münchen/python"]))
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    done = subprocess.run(
        [sys.executable, "-m", "dflash_deploy", "emit", str(tmp_path / "s")], capture_output=True, check=True
    )
    assert 'ExecStart="/münchen/python"' in done.stdout.decode()


def test_no_study_and_no_feasible_trial_are_told_apart(tmp_path: Path):
    assert emit().returncode == 4
    write_study(tmp_path / "s", trial(0, None))
    done = emit(tmp_path / "s")
    assert done.returncode == 1
    assert "within its limits" in done.stderr


def _damaged(study: Path, what: str) -> Path:
    """A study's record or a trial's, put out of order in one way."""
    record, first = study / "study.json", trial_folder(study, 0) / "trial.json"
    match what:
        case "cut":
            first.write_text(first.read_text()[:200])
        case "binary":
            first.write_bytes(b"\xff\xfe\0")
        case "deep":
            first.write_text("[" * 100_000)
        case "a pipe":
            first.unlink()
            os.mkfifo(first)
        case "huge":
            with first.open("wb") as file:
                file.truncate(1 << 40)
        case "without a time zone":
            record.write_text(record.read_text().replace("2026-01-02T03:04:00Z", "2026-01-02T03:04:00"))
            return record
    return first


@pytest.mark.parametrize(
    "what",
    [
        "cut",
        "binary",
        "deep",
        "a pipe",
        "huge",
        "without a time zone",
    ],
)
def test_a_damaged_record_is_named(study: Path, what: str):
    damaged = _damaged(study, what)
    done = emit()
    assert done.returncode == 3
    assert done.stderr.startswith(f"error: {damaged} is no record that this tool reads: ")
    assert len(done.stderr.splitlines()) == 2
    assert "pydantic" not in done.stderr


@pytest.mark.parametrize("also", ["", '"a_key_to_come": 1,'])
def test_a_study_of_a_newer_version_of_the_tool_is_said_to_be_one(study: Path, also: str):
    record = study / "study.json"
    record.write_text(record.read_text().replace('"schema_version": 1,', f'"schema_version": 2, {also}'))
    done = emit()
    assert done.returncode == 3
    assert "was written by a newer dflash-deploy (records of version 2; this one reads 1)" in done.stderr


def test_text_of_a_record_never_acts_on_a_terminal_or_a_unit(study: Path):
    hostile = "x\x1b]0;t\x07\x9b31m\u202e\n[Service]\nExecStart=/bin/evil\\"
    record = trial(7, 900.0, source=hostile)
    write_record(trial_folder(study, 7) / "trial.json", record)
    done = emit()
    assert done.returncode == 0
    assert systemd.settings(done.stdout)["ExecStart"][0].startswith("/env/bin/python")
    assert done.stdout.replace("\n", "").isprintable()

    write_record(trial_folder(study, 8) / "trial.json", trial(8, None, reason=hostile))
    done = emit("--trial", 8)
    assert done.returncode == 1
    assert done.stderr.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("form", "name", "begins"),
    [
        ("shell", "dflash-sglang-qwen3-8-27b.sh", "#!/bin/bash\n# dflash-deploy"),
        ("command", "dflash-sglang-qwen3-8-27b.command", ""),
        ("compose", "compose.yaml", "# dflash-deploy"),
        ("quadlet", "dflash-sglang-qwen3-8-27b.container", "# dflash-deploy"),
    ],
)
def test_the_other_forms_hold_the_same_configuration(tmp_path: Path, form: str, name: str, begins: str):
    flags = {"model-path": "org/model", "mem-fraction-static": 0.81}
    write_study(tmp_path / "s", trial(0, 207.5, flags=flags))
    image = ["--image", "docker.io/lmsysorg/sglang:v0.5.23"] if form in ("compose", "quadlet") else []
    (tmp_path / "out").mkdir()
    done = emit(tmp_path / "s", "--format", form, *image, "--out", tmp_path / "out")
    assert (done.returncode, [path.name for path in (tmp_path / "out").iterdir()]) == (0, [name])
    text = (tmp_path / "out" / name).read_text()
    assert text.startswith(begins)
    assert "sglang.launch_server" in text
    assert "0.81" in text


def test_a_container_without_an_image_is_refused(study: Path):
    done = emit("--format", "compose")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--image" in done.stderr

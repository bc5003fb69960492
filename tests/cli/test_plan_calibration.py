"""What a server's log teaches ``dflash-deploy plan``: told, kept when asked, shown, forgotten."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from dflash_deploy.engine.boot import BootRecord
from dflash_deploy.engine.sglang.bootlog import read_boot_log
from dflash_deploy.errors import ExitCode
from tests.simulator.conftest import FOUR_USERS, ONE_USER, launching
from tests.tool import run_tool

CARD = ("--gpu", "rtx-5090")


BootLog = Callable[[str, int], str]


@pytest.fixture(scope="module")
def boot_log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BootLog]:
    """The log of a simulated server, by its flags and the seed that draws its machine."""
    with launching(tmp_path_factory.mktemp("simulated")) as start:

        @cache
        def log(flags: str, seed: int) -> str:
            server = start(flags, scale=5000, DFLASH_SIM_SEED=str(seed))
            server.process.kill()
            return server.text()

        yield log


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_tool("plan", *arguments)


def planned(*arguments: str) -> dict:
    done = run("--json", *arguments)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def observed(log: str) -> BootRecord:
    return read_boot_log(log.splitlines())


@pytest.mark.parametrize("seed", [1, 4, 11])
@pytest.mark.parametrize(("first", "second"), [(ONE_USER, FOUR_USERS), (FOUR_USERS, ONE_USER)])
def test_one_log_brings_the_next_plan_within_256_mib(
    boot_log: BootLog, home: Path, seed: int, first: str, second: str
):
    logs = [boot_log(flags, seed) for flags in (first, second)]
    (home / "boot.log").write_text(logs[0])
    command = ("--", "sglang", "serve", *second.split())
    assert planned(*CARD, *command)["correction"] is None

    told = planned(*CARD, "--from-log", str(home / "boot.log"), "--keep")["calibration"]
    assert told["kept"] is True
    assert abs(told["ready_free_error_after_mib"]) < 16
    after = planned(*CARD, *command)
    assert after["correction"]["boots"] == 1
    seen = observed(logs[1])
    assert after["ready_free_mib"] == pytest.approx(seen.free_at_ready_gib * 1024, abs=256)
    assert after["kv_tokens"] == pytest.approx(seen.kv_tokens, rel=0.05)
    without = after["correction"]["without"]
    assert without["predicted_peak_mib"] != after["predicted_peak_mib"]


def test_a_log_corrects_nothing_unasked(boot_log: BootLog, home: Path):
    log = home / "pasted.log"
    log.write_text(boot_log(ONE_USER, 5))
    shown = run(*CARD, "--from-log", str(log))
    assert "not kept" in shown.stdout
    assert "--keep" in shown.stdout
    assert not (home / "state").exists()
    assert run("--calibration").stdout.startswith("Nothing is kept")


def test_what_is_kept_is_told_shown_and_forgotten(boot_log: BootLog, home: Path):
    log = home / "mine.log"
    log.write_text(boot_log(ONE_USER, 5))
    command = ("--", "sglang", "serve", *ONE_USER.split())
    kept = run(*CARD, "--from-log", str(log), "--keep")
    assert "kept: later plans for NVIDIA GeForce RTX 5090, SGLang 0.5.23" in " ".join(kept.stdout.split())
    told = " ".join(run(*CARD, *command).stdout.split())
    assert "corrected by one log of this card with this SGLang and model: predicted peak" in told
    # Another release, model or card is another matter.
    assert planned(*CARD, "--sglang", "0.5.22", *command)["correction"] is None
    assert planned("--gpu", "32000", *command)["correction"] is None

    assert "agrees with what is kept" in run(*CARD, "--from-log", str(log), "--keep").stdout
    log.write_text(boot_log(FOUR_USERS, 5))
    run(*CARD, "--from-log", str(log), "--keep")
    shown = run("--calibration")
    assert "NVIDIA GeForce RTX 5090, SGLang 0.5.23" in shown.stdout
    assert "2; the last one counts" in shown.stdout
    (record,) = json.loads(run("--calibration", "--json").stdout)["calibration"]
    assert (record["boots"], record["target"]) == (2, "qwen3.8-27b-nvfp4")
    assert json.loads(run("--calibration", "--gpu", "h200", "--json").stdout)["calibration"] == []

    assert run("--reset-calibration", "--gpu", "h200").stdout.startswith("0 removed")
    assert run("--reset-calibration", *CARD).stdout.startswith("1 removed")
    assert planned(*CARD, *command)["correction"] is None


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--keep", *CARD, "rtx5090-single-user"), 2, "no log was given"),
        (("--calibration", "rtx5090-single-user"), 2, "stand alone"),
        (("--calibration", "--reset-calibration"), 2, "stand alone"),
        (("--calibration", "--gpu", "no-such-card"), 4, "no-such-card"),
    ],
)
def test_mistakes(home: Path, arguments: tuple[str, ...], status: int, said: str):
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr


def test_a_log_that_teaches_nothing_is_not_kept(home: Path):
    log = home / "early.log"
    log.write_text(
        "[2026-08-24 13:31:10] server_args={'model_path': 'RadixArk/Qwen3.8-27B-NVFP4', 'tp_size': 1}\n"
    )
    done = run(*CARD, "--from-log", str(log), "--keep")
    assert done.returncode == 3
    assert "teaches nothing" in done.stderr
    assert not (home / "state").exists()


def test_a_log_of_another_command_is_not_kept(boot_log: BootLog, home: Path):
    log = home / "mine.log"
    log.write_text(boot_log(ONE_USER, 5))
    other = ("--", "sglang", "serve", *ONE_USER.split(), "--mem-fraction-static", "0.6")
    done = run(*CARD, "--from-log", str(log), "--keep", *other)
    assert done.returncode == ExitCode.INVALID_INPUT
    assert "the log is of another one" in " ".join(done.stderr.split())
    assert not (home / "state").exists()


def test_the_journal_of_a_unit_is_kept(boot_log: BootLog, home: Path, monkeypatch: pytest.MonkeyPatch):
    """``service install`` does the same once the service serves."""
    (home / "journal").write_text(
        "".join(
            f"2026-08-24T13:31:18+0000 host sglang[7]: {line}\n"
            for line in boot_log(ONE_USER, 5).splitlines()
        )
    )
    programs = {
        "systemctl": f"echo '[Service]'\necho 'ExecStart=/opt/env/bin/sglang serve {ONE_USER}'",
        "journalctl": f"cat {home / 'journal'}",
    }
    for name, text in programs.items():
        (home / name).write_text(f"#!/bin/sh\n{text}\n")
        (home / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(home), prepend=":")
    told = planned(*CARD, "--sglang", "0.5.23", "--unit", "dflash-sglang-qwen", "--keep")["calibration"]
    assert told["kept"] is True
    assert abs(told["ready_free_error_after_mib"]) < 16
    (record,) = json.loads(run("--calibration", "--json").stdout)["calibration"]
    assert (record["version"], record["target"]) == ("0.5.23", "qwen3.8-27b-nvfp4")


def test_a_state_folder_that_cannot_be_written(boot_log: BootLog, home: Path):
    log = home / "mine.log"
    log.write_text(boot_log(ONE_USER, 5))
    (home / "state").write_text("a file where the folder should be")
    done = run(*CARD, "--from-log", str(log), "--keep")
    assert done.returncode == ExitCode.UNAVAILABLE
    assert "cannot be kept" in done.stderr
    assert "Traceback" not in done.stderr

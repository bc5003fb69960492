"""``dflash-deploy doctor`` as a person or a script runs it."""

from __future__ import annotations

import json
import os
import pty
import socket
import stat
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.machine.nvml_stub import DRIVER_NOT_LOADED, StubCard, StubProcess, stub_env

from .conftest import Doctor, write_profile

DOCUMENTED = (Path(__file__).parents[2] / "docs" / "json.md").read_text().split("## doctor --json")[1]


def found_by(document: dict[str, object]) -> dict[str, dict[str, object]]:
    return {one["id"]: one for one in document["findings"]}  # type: ignore[attr-defined]


def test_people_get_plain_text_of_80_columns_with_a_fix_for_each_failure(doctor: Doctor):
    done = doctor(cards=(StubCard(),))
    assert done.returncode == 1
    assert "\x1b" not in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if "fix:" not in line) <= 80
    assert "dflash-deploy env create" in done.stdout
    assert "driver and cards" in done.stdout


def test_json_is_one_object_with_the_documented_keys(doctor: Doctor):
    done = doctor("--json", cards=(StubCard(),))
    document = json.loads(done.stdout)
    for key in {*document, *document["findings"][0], *document["summary"]}:
        assert f"`{key}`" in DOCUMENTED, key
    for one in document["findings"]:
        assert f"`{one['id']}`" in DOCUMENTED, one["id"]
    assert document["exit_status"] == done.returncode


def test_cards_are_judged_through_the_driver(doctor: Doctor):
    bad = StubCard(
        used_mib=9000,
        processes=[StubProcess(os.getpid(), 8998)],
        numbers={"limit": 400_000, "width": 4, "persistence": 0, "reasons": 0x40},
    )
    found = found_by(json.loads(doctor("--json", cards=(bad,)).stdout))
    for name in ("vram", "power", "pcie", "persistence", "clocks"):
        assert found[name]["status"] == "warn", name
    assert str(os.getpid()) in str(found["vram"]["text"])
    good = found_by(json.loads(doctor("--json", cards=(StubCard(),)).stdout))
    for name in ("driver", "vram", "power", "pcie", "persistence", "clocks"):
        assert good[name]["status"] == "pass", name


def test_a_driver_that_is_not_loaded(nvml: Path, doctor: Doctor):
    done = doctor("--json", env=stub_env(nvml, init_code=DRIVER_NOT_LOADED))
    found = found_by(json.loads(done.stdout))
    assert found["driver"]["status"] == "fail"
    assert found["driver"]["fix"]
    assert "vram" not in found


def test_a_profile_adds_its_model_plan_and_port(doctor: Doctor, pair: tuple[Path, Path], tmp_path: Path):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        profile = write_profile(tmp_path, *pair, name="mine", port=server.getsockname()[1])
        taken = found_by(json.loads(doctor(str(profile), "--json", cards=(StubCard(),)).stdout))
    assert taken["port"]["status"] == "fail"
    assert taken["target"]["status"] == taken["draft"]["status"] == taken["draft-match"]["status"] == "pass"
    assert taken["plan"]["kind"] == "predicted"
    assert "hashes" not in taken
    hashed = found_by(json.loads(doctor(str(profile), "--hashes", "--json", cards=(StubCard(),)).stdout))
    assert hashed["hashes"]["status"] == "unknown"
    assert hashed["port"]["status"] == "pass"


def test_set_changes_the_profile(doctor: Doctor):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        taken = f"service.port={server.getsockname()[1]}"
        done = doctor("rtx5090-single-user", "--set", taken, "--json", cards=(StubCard(),))
    assert found_by(json.loads(done.stdout))["port"]["status"] == "fail"


@pytest.mark.parametrize(
    "arguments",
    [("--set", "a=b"), ("--hashes",), ("--yes",), ("--fix",), ("--fix", "--json")],
)
def test_options_that_make_no_sense_are_refused(doctor: Doctor, arguments: tuple[str, ...]):
    done = doctor(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "fix:" in done.stderr


def test_a_profile_that_is_not_there(doctor: Doctor):
    done = doctor("no-such-profile")
    assert done.returncode == 4
    assert done.stderr.startswith("error: ")


def test_fix_mends_what_is_safe_and_reports_it(doctor: Doctor, tmp_path: Path):
    token = Path(os.environ["HF_HOME"]) / "token"
    token.write_text("hf_abcdefgh")
    token.chmod(0o644)
    missing = {"TRITON_CACHE_DIR": str(tmp_path / "kernels")}
    before = found_by(json.loads(doctor("--json", cards=(StubCard(),), env=missing).stdout))
    assert before["hub-token"]["fixable"]
    assert stat.S_IMODE(token.stat().st_mode) == 0o644
    document = json.loads(doctor("--fix", "--yes", "--json", cards=(StubCard(),), env=missing).stdout)
    assert {one["id"]: one["outcome"] for one in document["repairs"]} == {
        "hub-token": "done",
        "folders": "done",
    }
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert (tmp_path / "kernels").is_dir()
    after = found_by(document)
    assert after["hub-token"]["status"] == after["folders"]["status"] == "pass"
    again = json.loads(doctor("--fix", "--yes", "--json", cards=(StubCard(),), env=missing).stdout)
    assert again["repairs"] == []
    plain = doctor("--fix", "--yes", cards=(StubCard(),), env=missing)
    assert "nothing here can be mended" in plain.stdout


def test_a_repair_that_fails_is_the_status_of_the_command(doctor: Doctor, tmp_path: Path):
    # A name that no file system takes.
    missing = {"TRITON_CACHE_DIR": str(tmp_path / ("kernels" * 40))}
    done = doctor("--fix", "--yes", "--json", cards=(StubCard(),), env=missing)
    document = json.loads(done.stdout)
    assert document["exit_status"] == done.returncode == 1
    assert {one["outcome"] for one in document["repairs"]} == {"failed"}


def at_a_terminal(arguments: list[str], typed: bytes, variables: dict[str, str], *, status: int = 1) -> str:
    """What the command shows at a terminal where this is typed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(variables)
        os.execv(sys.executable, [sys.executable, "-m", "dflash_deploy", "doctor", *arguments])  # noqa: S606
    shown = b""
    with suppress(OSError):
        while part := os.read(terminal, 1 << 16):
            shown += part
            if b"[y/N]" in shown and typed:
                os.write(terminal, typed)
                typed = b""
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status
    return shown.decode()


def test_at_a_terminal_each_change_is_asked_for(nvml: Path):
    token = Path(os.environ["HF_HOME"]) / "token"
    token.write_text("hf_abcdefgh")
    token.chmod(0o644)
    variables = {**stub_env(nvml, StubCard()), "TERM": "xterm-256color"}
    refused = at_a_terminal(["--fix"], b"n\n", variables)
    assert f"chmod 600 {token}? [y/N]" in refused.replace("\r\n", "\n")
    assert "declined" in refused
    assert "\x1b[1;31mfail" in refused
    assert stat.S_IMODE(token.stat().st_mode) == 0o644
    assert "HF token now: pass" in at_a_terminal(["--fix"], b"y\n", variables)
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    token.chmod(0o644)
    assert "Traceback" not in at_a_terminal(["--fix"], b"\x03", variables, status=130)
    assert stat.S_IMODE(token.stat().st_mode) == 0o644

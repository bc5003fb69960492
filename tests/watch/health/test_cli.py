"""``dflash-deploy health`` as a monitoring system, a script or a person runs it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.tool import run_tool
from tests.watch.engine_server import HEALTHY, serving

WELL = {**HEALTHY, "/generate": (200, b'{"meta_info": {"completion_tokens": 1}}')}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_tool("health", *arguments, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})


def test_a_server_that_is_well_gives_0_and_one_line_with_figures():
    with serving(WELL) as engine:
        done = run("--url", engine.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("DFLASH OK - ")
    assert done.stdout.count("\n") == 1
    assert "running_requests=3;" in done.stdout


def test_a_dead_one_gives_2_and_says_what_is_dead():
    with serving({**HEALTHY, "/health": (503, b"")}) as engine:
        done = run("--url", engine.url, "--timeout", "4", "--layers")
    assert done.returncode == 2
    assert done.stdout.startswith("DFLASH CRITICAL - ")
    assert "scheduler" in done.stdout
    assert max(map(len, done.stdout.splitlines()[1:])) <= 80


def test_nothing_that_listens_is_critical_where_an_address_was_given():
    done = run("--url", "127.0.0.1:1")
    assert done.returncode == 2
    assert "nothing takes connections" in done.stdout


def test_a_name_that_nothing_has_gives_3():
    done = run("no-such-service")
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.startswith("DFLASH UNKNOWN - ")
    assert run("no-such-service", "--json").returncode == 3


def test_what_is_given_wrong_gives_3(tmp_path: Path):
    assert run("--url", "ftp://x").returncode == 3
    done = run("--url", "127.0.0.1:1", "--api-key-file", str(tmp_path / "absent"))
    assert done.returncode == 3
    assert done.stderr.startswith("error: ")
    # A monitor reads standard output alone.
    assert done.stdout.startswith("DFLASH UNKNOWN - ")
    assert "cannot be read" in done.stdout
    assert json.loads(run("--url", "ftp://x", "--json").stdout)["verdict"] == "unknown"
    assert run("--url", "127.0.0.1:1", "--act").returncode == 3


@pytest.mark.parametrize("wrong", [["--no-such"], ["--timeout", "soon"], ["--timeout", "0.1"], ["a", "b"]])
def test_a_wrong_command_line_is_unknown_and_not_the_services_fault(wrong: list[str]):
    done = run(*wrong)
    assert done.returncode == 3
    assert done.stdout.startswith("DFLASH UNKNOWN - ")
    assert len(done.stdout.splitlines()) == 1
    assert "dflash-deploy health --help" in done.stderr


def test_a_file_that_cannot_be_written_is_unknown(tmp_path: Path):
    with serving(WELL) as engine:
        done = run("--url", engine.url, "--prometheus", str(tmp_path))
    assert done.returncode == 3
    assert done.stdout.startswith("DFLASH UNKNOWN - ")


def test_a_server_that_never_answers_anything_ends_in_time():
    with serving({}) as engine:
        done = run("--url", engine.url, "--timeout", "3", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == found["layers"][0].get("code", 2) == 2
    assert found["verdict"] == "critical"
    assert found["took_s"] < 60


def test_wait_ends_as_soon_as_it_serves():
    answers = {**WELL, "/generate": (503, b"")}

    class Turning(dict[str, tuple[int, bytes]]):
        asked = 0

        def __getitem__(self, path: str) -> tuple[int, bytes]:
            if path == "/generate":
                self.asked += 1
                if self.asked >= 2:
                    return WELL["/generate"]
            return super().__getitem__(path)

    turning = Turning(answers)
    with serving(turning) as engine:
        done = run("--url", engine.url, "--wait", "90")
    assert done.returncode == 0
    assert turning.asked == 2


def test_wait_gives_up():
    with serving({**WELL, "/generate": (503, b"")}) as engine:
        assert run("--url", engine.url, "--wait", "6").returncode == 2


def test_prometheus_text_is_written_whole(tmp_path: Path):
    file = tmp_path / "dflash.prom"
    with serving(WELL) as engine:
        done = run("--url", engine.url, "--prometheus", str(file))
    assert done.returncode == 0
    text = file.read_text()
    assert f'dflash_health_verdict{{service="{engine.url}"}} 0\n' in text
    assert file.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [file]


def test_the_key_is_sent_and_not_shown(tmp_path: Path):
    key = tmp_path / "key.yaml"
    key.write_text("api-key: sesame\n")
    with serving(WELL) as engine:
        done = run("--url", engine.url, "--api-key-file", str(key), "--json")
        assert engine.keys == {"Bearer sesame"}
    assert "sesame" not in done.stdout + done.stderr

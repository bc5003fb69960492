"""``dflash-deploy status`` as a person or a script runs it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.tool import run_tool

from .engine_server import HEALTHY, serving


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_tool("status", *arguments)


def test_a_healthy_server_gives_0_and_plain_text_in_a_pipe():
    with serving(HEALTHY) as engine:
        done = run("--url", engine.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "healthy" in done.stdout
    assert "No GPU" in done.stdout or "GPUs of this machine" in done.stdout


def test_json_is_one_object_with_the_documented_keys():
    with serving(HEALTHY) as engine:
        done = run("--url", f"{engine.url}/v1", "--json")
    found = json.loads(done.stdout)
    assert set(found) == {"schema_version", "healthy", "servers", "gpus", "gpu_problem", "gpu_fix"}
    (server,) = found["servers"]
    documented = (Path(__file__).parents[2] / "docs" / "json.md").read_text().split("## status --json")[1]
    for key in {*found, *server, *server["limits"], *server["load"]}:
        assert f"`{key}`" in documented
    assert (server["health"], server["model"], server["kind"]) == ("healthy", "a-model", "measured")


def test_an_unhealthy_server_gives_1():
    with serving({**HEALTHY, "/health": (503, b"")}) as engine:
        assert run("--url", engine.url, "--timeout", "5").returncode == 1


def test_nothing_found_gives_4_and_says_so():
    done = run("no-such-service")
    assert done.returncode == 4
    assert "No server is found for no-such-service" in done.stdout
    done = run("./no-such-profile.yaml")
    assert done.returncode == 4
    assert done.stderr == "error: no-such-profile.yaml: no such file\n"


def test_a_profile_names_its_port_and_its_key_goes_there_alone(tmp_path: Path):
    key = tmp_path / "key.yaml"
    key.write_text("api-key: sesame\n")
    with serving(HEALTHY) as engine:
        profile = tmp_path / "mine.yaml"
        service = f"{{name: mine, port: {engine.port}, api_key_file: {key}}}"
        profile.write_text(f"extends: rtx5090-single-user\nservice: {service}\n")
        done = run(str(profile), "--json")
        assert engine.keys == {"Bearer sesame"}
    assert json.loads(done.stdout)["servers"][0]["name"] == "mine"
    assert done.returncode == 0
    assert "sesame" not in done.stdout


def test_a_key_file_that_nobody_writes_does_not_hang(tmp_path: Path):
    os.mkfifo(tmp_path / "key.yaml")
    done = run("--url", "127.0.0.1:1", "--api-key-file", str(tmp_path / "key.yaml"))
    assert done.returncode == 5
    assert "no regular file" in done.stderr


def test_a_password_in_an_address_is_refused_and_not_shown():
    done = run("--url", "http://me:sesame@127.0.0.1:1")
    assert done.returncode == 2
    assert "sesame" not in done.stdout + done.stderr


def test_a_key_is_not_sent_to_whatever_is_found(tmp_path: Path):
    done = run("--api-key-file", str(tmp_path / "key.yaml"))
    assert done.returncode == 2
    assert "fix:" in done.stderr


def test_a_wrong_address_is_one_line(tmp_path: Path):
    done = run("--url", "ftp://x")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr

"""The programs that a unit runs around the engine, run as systemd would run them."""

from __future__ import annotations

import hashlib
import http.server
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dflash_deploy.deploy import gate
from dflash_deploy.deploy.seal import Seal, SealedFile
from tests.machine.nvml_stub import NOT_SUPPORTED, StubCard, stub_env, stub_folder

from . import systemd_syntax as systemd


def _command(value: str) -> list[str]:
    return systemd.command(systemd.settings(f"[Service]\nX={value}\n")["X"][0])


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_taken_port_is_told_in_one_line(host: str):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as taken:
        port = taken.getsockname()[1]
        checked = _run(gate.port_check(sys.executable, host, port))
        assert checked.returncode == 1
        assert checked.stderr.startswith(f"{host} port {port} cannot be listened on: Address already in use")
    assert _run(gate.port_check(sys.executable, host, port)).returncode == 0


def test_the_wait_ends_when_health_is_answered_with_200():
    server = _Engine(("127.0.0.1", 0), _Health)
    wait = _command(gate.ready_wait(sys.executable, "0.0.0.0", server.server_address[1]))
    with server, subprocess.Popen(wait, env={**os.environ, "MAINPID": str(os.getpid())}) as waiting:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            assert waiting.wait(timeout=60) == 0
        finally:
            waiting.kill()
            server.shutdown()
    assert server.answers == [503, 200]


def test_the_wait_fails_when_the_engine_has_ended():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    failed = _run(gate.ready_wait(sys.executable, "127.0.0.1", port), MAINPID=str(ended.pid))
    assert failed.returncode == 1
    assert failed.stderr == "the engine ended before it answered: its own lines above say why\n"


def test_the_wait_goes_on_while_nothing_listens():
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    wait = _command(gate.ready_wait(sys.executable, "127.0.0.1", port))
    with subprocess.Popen(wait, env={**os.environ, "MAINPID": str(os.getpid())}) as waiting:
        time.sleep(2)
        assert waiting.poll() is None
        waiting.kill()


@pytest.fixture
def sealed(tmp_path: Path) -> Seal:
    site = tmp_path / "site [1] 5%"
    (site / "sglang-0.5.23.dist-info").mkdir(parents=True)
    (site / "sglang-0.5.23.dist-info" / "METADATA").write_text(
        "Name: sglang\nVersion: 0.5.23\n\nVersion: x\n"
    )
    module = site / "patched module.py"
    module.write_text("patched = True\n")
    sha256 = hashlib.sha256(module.read_bytes()).hexdigest()
    return Seal(str(site), "0.5.23", (SealedFile("a-patch", str(module), sha256),))


def test_a_sealed_environment_may_start(sealed: Seal):
    done = _run(gate.seal_check(sys.executable, sealed))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("another version", "has SGLang 0.5.24, and the service is for 0.5.23"),
        ("no version", "has SGLang not at all"),
        ("two versions", "0.5.2"),
        ("changed module", "is not as its patch left it"),
        ("no module", "No such file"),
        ("cut patch", "a patch was cut short"),
    ],
)
def test_a_changed_environment_may_not_start(sealed: Seal, harm: str, said: str):
    site = Path(sealed.site_packages)
    metadata, module = site / "sglang-0.5.23.dist-info" / "METADATA", Path(sealed.files[0].path)
    match harm:
        case "another version":
            metadata.write_text("Version: 0.5.24\n")
        case "no version":
            metadata.unlink()
        case "two versions":
            (site / "sglang-0.5.24.dist-info").mkdir()
            (site / "sglang-0.5.24.dist-info" / "METADATA").write_text("Version: 0.5.24\n")
        case "changed module":
            module.write_text("patched = False\n")
        case "no module":
            module.unlink()
        case "cut patch":
            (site / ".dflash-deploy-patches").mkdir()
            (site / ".dflash-deploy-patches" / "x.applying.json").write_text("{}")
    done = _run(gate.seal_check(sys.executable, sealed))
    assert done.returncode == 1
    assert said in done.stderr
    assert "dflash-deploy service install" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.fixture(scope="module")
def driver() -> Path:
    return stub_folder()


def _wait_for(driver: Path, *cards: StubCard, free_mib: int, bound_s: int, wanted_cards: int = 1, **env: str):
    value = gate.vram_wait(sys.executable, free_mib, bound_s=bound_s, cards=wanted_cards)
    return _run(value, **stub_env(driver, *cards), **env)


def test_memory_that_comes_back_is_waited_for(driver: Path):
    card = StubCard(used_mib=(30_000, 30_000, 2))
    done = _wait_for(driver, card, free_mib=30_000, bound_s=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_memory_that_does_not_come_back_is_told(driver: Path):
    done = _wait_for(driver, StubCard(used_mib=30_000), free_mib=30_000, bound_s=1)
    assert done.returncode == 1
    assert "MiB of VRAM are free, 30000 are needed" in done.stderr


def test_the_cards_that_count_are_those_that_are_named(driver: Path):
    busy, free = StubCard(used_mib=30_000), StubCard(used_mib=2)
    uuid = "GPU-00000000-0000-0000-0000-00000000000{}"
    for named, status in (("", 0), (uuid.format(1), 0), (uuid.format(0), 1)):
        done = _wait_for(driver, busy, free, free_mib=30_000, bound_s=0, CUDA_VISIBLE_DEVICES=named)
        assert (named, done.returncode) == (named, status), done.stderr
    order = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert _wait_for(driver, busy, free, free_mib=30_000, bound_s=0, **order).returncode == 1
    assert _wait_for(driver, busy, free, free_mib=30_000, bound_s=0, wanted_cards=2).returncode == 1


def test_without_a_driver_or_figures_of_memory_nothing_is_waited_for(driver: Path, tmp_path: Path):
    done = _run(gate.vram_wait(sys.executable, 30_000, bound_s=0, cards=1), LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 0
    errors = {"nvmlDeviceGetMemoryInfo": NOT_SUPPORTED, "nvmlDeviceGetMemoryInfo_v2": NOT_SUPPORTED}
    assert _wait_for(driver, StubCard(errors=errors), free_mib=30_000, bound_s=0).returncode == 0


def _run(value: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(value), env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False
    )


class _Engine(http.server.ThreadingHTTPServer):
    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.answers: list[int] = []


class _Health(http.server.BaseHTTPRequestHandler):
    server: _Engine

    def do_GET(self):
        assert self.path == "/health"
        status = 200 if self.server.answers else 503
        self.server.answers.append(status)
        self.send_response(status)
        self.end_headers()

    def log_message(self, *_):
        pass


_ENGINE = """
import logging, multiprocessing, os, sys

def child():
    logging.basicConfig(level=logging.INFO)
    logging.info("a child, %s", __name__)

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    key = open(sys.argv[-1]).read().split()[1]
    logging.info(f"settings={sys.argv} {{'api_key': '{key}'}}")
    logging.warning("by argument: %s", key)
    logging.info("a record that cannot be written: %d", key)
    print(f"printed: {key}")
    print("in the command lines:", key in open("/proc/self/cmdline").read(), flush=True)
    started = multiprocessing.get_context("spawn").Process(target=child)
    started.start()
    started.join()
    sys.exit(7)
"""


def test_an_engine_with_a_key_logs_another_word_in_its_place(tmp_path: Path):
    (tmp_path / "an_engine.py").write_text(_ENGINE)
    file = tmp_path / "engine.yaml"
    file.write_text("api-key: sesame100%\n")
    argv = gate.engine_with_key((sys.executable, "-m", "an_engine", "--model-path", "a b"))
    done = subprocess.run(
        [*argv, "--config", file], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 7, said
    assert "'api_key': '(the API key)'" in said
    assert "by argument: (the API key)" in said
    assert "'--model-path', 'a b', '--config'" in said
    assert "in the command lines: False" in said
    # What the engine starts finds the engine as its main module, as it would without the program in front.
    assert "a child, __mp_main__" in said
    assert "Arguments: ('(the API key)',)" in said
    assert "printed: (the API key)" in said
    assert "sesame" not in said


def test_a_router_is_given_its_key_after_it_has_started(tmp_path: Path):
    (tmp_path / "a_router.py").write_text(
        "import sys\nprint(sys.argv[1:], 'sesame' in open('/proc/self/cmdline').read())\n"
    )
    file = tmp_path / "engine.yaml"
    file.write_text("api-key: sesame\n")
    argv = gate.router_with_key((sys.executable, "-m", "a_router", "--port", "1"))
    done = subprocess.run(
        [*argv, "--config", file], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "['--port', '1', '--api-key', 'sesame'] False\n", done.stderr

"""Starts of the simulator that fail, at every stage, are named right from the log alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dflash_deploy.diagnosis import Diagnosis, diagnose
from dflash_deploy.server.ports import free_port
from tests.simulator.conftest import DFLASH2, NVFP4, ONE_USER, wait

CARD = "rtx-5090"
BIG_LISTS = f"{NVFP4} {DFLASH2} --mamba-ssm-dtype bfloat16 --kv-cache-dtype fp8_e4m3 --max-running-requests 8"
CASES: dict[str, tuple[str, dict[str, str], str]] = {
    "a flag that is not known": (f"{ONE_USER} --no-such-flag 3", {}, "flag-unknown"),
    "a flag in short that may be several": (f"{NVFP4} --cuda-graph 3", {}, "flag-ambiguous"),
    "a value that is none": (f"{NVFP4} --attention-backend flash_infer", {}, "flag-choice"),
    "a value of the wrong kind": (f"{NVFP4} --mem-fraction-static most", {}, "flag-value"),
    "a card without 4-bit units": (ONE_USER, {"DFLASH_SIM_CARD": "rtx-3090"}, "quantization-card"),
    "a release without DFlash2": (ONE_USER, {"DFLASH_SIM_VERSION": "0.5.18"}, "architecture-unsupported"),
    "weights larger than the fraction": (f"{ONE_USER} --mem-fraction-static 0.7", {}, "weights-leave-no-kv"),
    "fewer slots than one request takes": (
        ONE_USER.replace("extra_buffer_lazy", "extra_buffer"), {}, "state-slots-too-few"
    ),
    "no room for the pools": (f"{BIG_LISTS} --mem-fraction-static 0.985", {}, "oom-pools"),
    "no room for prefill graphs": (f"{BIG_LISTS} --mem-fraction-static 0.96", {}, "oom-prefill-capture"),
    "no room for decode graphs": (
        f"{BIG_LISTS} --mem-fraction-static 0.98 --disable-prefill-cuda-graph", {}, "oom-decode-capture"
    ),
    "no room for the first request": (
        f"{BIG_LISTS} --mem-fraction-static 0.97 --disable-prefill-cuda-graph", {}, "oom-first-request"
    ),
    "an address in use": (ONE_USER, {"DFLASH_SIM_FAULT": "port-taken"}, "port-taken"),
    "death while loading": (ONE_USER, {"DFLASH_SIM_FAULT": "die:load"}, "unknown-failure"),
    "death in sizing": (ONE_USER, {"DFLASH_SIM_FAULT": "die:sizing"}, "unknown-failure"),
    "death in capture": (ONE_USER, {"DFLASH_SIM_FAULT": "die:decode-capture"}, "unknown-failure"),
}  # fmt: skip
_DEADLINE_S = 60.0


def port() -> str:
    return str(free_port("127.0.0.1"))


def simulate(flags: str, env: dict[str, str], log: Path) -> Diagnosis:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DFLASH_SIM_")}
    environment |= {"DFLASH_SIM_CARD": CARD, "DFLASH_SIM_TIME_SCALE": "300"} | env
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "dflash_deploy.simulator", *flags.split(), "--port", port()],
            stdout=out, stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip
    try:
        if "port-taken" in env.values():  # it hangs, as the engine does
            said(log, process, "[Errno 98]")
            status = None
        else:
            status = process.wait(_DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    return diagnose(log, exit_status=status)


def said(log: Path, process: subprocess.Popen[bytes], words: str) -> None:
    wait(lambda: words in log.read_text() or process.poll() is not None)
    assert words in log.read_text()


@pytest.fixture(scope="module")
def diagnoses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Diagnosis]]:
    folder = tmp_path_factory.mktemp("simulated")
    with ThreadPoolExecutor(2) as pool:
        yield dict(
            zip(
                CASES,
                pool.map(
                    lambda item: simulate(item[1][0], item[1][1], folder / f"{item[0]}.log"),
                    enumerate(CASES.values()),
                ),
                strict=True,
            )
        )


@pytest.mark.parametrize("case", CASES)
def test_a_failed_start_is_named(diagnoses, case):
    root = diagnoses[case].root
    assert root is not None
    assert root.id == CASES[case][2], root


def test_an_unknown_death_tells_its_stage(diagnoses):
    stages = {
        name: diagnoses[f"death {name}"].unknown.stage
        for name in ("while loading", "in sizing", "in capture")
    }
    assert stages == {"while loading": "load", "in sizing": "sizing", "in capture": "verify-capture"}


def test_figures_of_a_fix_come_from_the_log(diagnoses):
    assert dict(diagnoses["fewer slots than one request takes"].root.fix.flags) == {
        "mamba-radix-cache-strategy": "extra_buffer_lazy"
    }
    fix = diagnoses["weights larger than the fraction"].root.fix
    assert 0.75 <= fix.flags["mem-fraction-static"] <= 0.9
    fix = diagnoses["no room for decode graphs"].root.fix
    assert dict(fix.flags) == {"cuda-graph-max-bs-decode": 8, "mem-fraction-static": 0.95}


def test_a_start_that_succeeds_has_no_error(tmp_path):
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "dflash_deploy.simulator", *ONE_USER.split(), "--port", port()],
            stdout=out, stderr=subprocess.STDOUT,
            env=os.environ | {"DFLASH_SIM_CARD": CARD, "DFLASH_SIM_TIME_SCALE": "300"},
        )  # fmt: skip
    try:
        said(log, process, "ready to roll")
    finally:
        process.kill()
        process.wait()
    assert diagnose(log).root is None

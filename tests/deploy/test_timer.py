from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_deploy.deploy.timer import render_timer_units


def test_words_of_the_command_are_escaped_and_the_name_is_systemds_to_fill_in():
    units = render_timer_units(("/opt/a b%c/python", "-m", "dflash_deploy"), manager="system")
    text = units["dflash-sglang-health@.service"]
    command = " ".join(text.split("ExecStart=")[1].split("\n#")[0].replace("\\\n", " ").split())
    assert command.startswith('"/opt/a b%%c/python" ')
    assert " health %i --act --timeout 30" in command.replace('"-', "-").replace('" ', " ")
    assert "@INSTANCE@" not in text


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is missing")
@pytest.mark.parametrize("options", [(), ("--user",)])
def test_systemd_takes_what_the_command_writes(tmp_path: Path, options: tuple[str, ...]):
    command = [sys.executable, "-m", "dflash_deploy", "health", "--timer-units", str(tmp_path), *options]
    assert subprocess.run(command, timeout=60, check=False, capture_output=True).returncode == 0
    for name in ("dflash-sglang-health@.service", "dflash-sglang-health@.timer"):
        instance = tmp_path / name.replace("@", "@qwen")
        (tmp_path / name).rename(instance)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", "--man=no", *map(str, tmp_path.iterdir())],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if "dflash-sglang-health" in line]
    assert (done.returncode, said) == (0, [])

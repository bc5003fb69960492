"""Services as a person installs them, under a real systemd in a box; the engine is the simulator."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.deploy.test_emit import measurement, trial, write_study

from .test_unit_in_systemd import _reason_to_skip, boot

_ROOT = Path(__file__).parents[2]


def _why_not() -> str | None:
    places = ("/", sys.prefix, sys.base_prefix, __file__)
    if len({Path(place).stat().st_dev for place in places}) > 1:
        return "the tool is not on the root file system, which is all that the box has"
    return _reason_to_skip()


pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(_why_not() is not None, reason=str(_why_not())),
    pytest.mark.timeout(300),
]

# The serving interpreter: starts the simulator where SGLang would be started, and is Python otherwise.
_PYTHON = f"""#!/bin/sh
if [ "$1 $2" = "-m sglang.launch_server" ]; then
  shift 2
  exec {sys.executable} -m dflash_deploy.simulator "$@"
fi
exec /usr/bin/python3 "$@"
"""

# The box's root is a copy of the machine's that is thrown away: there, everyone may reach the tool.
_PLACES = (Path(sys.executable), Path(sys.executable).resolve(), _ROOT / "x")
_REACHED = [str(folder) for place in _PLACES for folder in place.parents]

_START = f"""
cd {_ROOT}
chmod o+rx {shlex.join(sorted(set(_REACHED)))}
tool() {{ {sys.executable} -m dflash_deploy "$@"; }}
install() {{ tool service install --from /box/$1 --python /box/env/bin/python --name box --allow-simulated; }}
served() {{ /usr/bin/python3 -c '
import json, urllib.request
print(json.load(urllib.request.urlopen("http://127.0.0.1:30000/v1/models"))["data"][0]["id"])
'; }}
find / -xdev -not -path '/proc/*' -name '*dflash-sglang-box*' > /box/before
"""


@pytest.fixture
def box(tmp_path: Path) -> Path:
    folder = tmp_path / "box"
    site = folder / "env" / "lib" / "python3.11" / "site-packages"
    for made in (folder / "env" / "bin", site / "sglang", site / "sglang-0.5.23.dist-info"):
        made.mkdir(parents=True)
    (site / "sglang" / "__init__.py").write_text("")
    (site / "sglang-0.5.23.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 0.5.23\n")
    python = folder / "env" / "bin" / "python"
    python.write_text(_PYTHON)
    python.chmod(0o755)
    # Services in the box run as users of their own.
    folder.chmod(0o755)
    _study(folder / "one")
    _study(folder / "two")
    _study(folder / "dies", "env.DFLASH_SIM_FAULT=die:load")
    _study(folder / "babbles", "env.DFLASH_SIM_FAULT=repeat")
    _study(folder / "grew", vram_used_mib=20_000)
    return folder


def _study(folder: Path, *overrides: str, vram_used_mib: int = 31_000) -> None:
    flags = {
        "model-path": "qwen3.8-27b-nvfp4",
        "served-model-name": folder.name,
        "mem-fraction-static": 0.85,
        "max-running-requests": 1,
        "context-length": 8192,
    }
    env = ("env.DFLASH_SIM_CARD=rtx-5090", 'env.DFLASH_SIM_TIME_SCALE="20"')
    measured = replace(measurement(100.0), vram_used_mib=vram_used_mib)
    best = trial(0, 100.0, flags=flags, measured=measured)
    write_study(folder, best, simulated=True, overrides=(*env, *overrides))


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_installed_replaced_taken_back_and_taken_away(box: Path):
    boot(
        box,
        _START
        + """
        install one > /box/first 2>&1 || exit 11
        served > /box/served-1
        install two > /box/second 2>&1 || exit 12
        served > /box/served-2
        tool service rollback box > /box/back 2>&1 || exit 13
        served > /box/served-3
        tool service list --json > /box/list || exit 14
        tool service diff box 1 2 > /box/diff || exit 15
        systemctl is-enabled dflash-sglang-box > /box/enabled
        systemctl show -p User,DynamicUser,NoNewPrivileges dflash-sglang-box > /box/shown
        tool service stop box > /box/stopped || exit 16
        tool service start box > /box/started || exit 17
        units=/etc/systemd/system
        check=$units/dflash-sglang-health@
        printf '[Timer]\\nOnActiveSec=1d\\n[Install]\\nWantedBy=timers.target\\n' > $check.timer
        printf '[Service]\\nExecStart=true\\n' > $check.service
        systemctl daemon-reload; systemctl enable --now dflash-sglang-health@box.timer || exit 21
        tool service uninstall box > /box/gone || exit 18
        systemctl is-active dflash-sglang-health@box.timer && exit 22
        ls $units/*/dflash-sglang-health@box.timer && exit 23
        rm -rf /var/cache/dflash-sglang-box /var/cache/private/dflash-sglang-box
        systemctl cat dflash-sglang-box && exit 19
        ls -d /var/lib/dflash-deploy && exit 20
        find / -xdev -not -path '/proc/*' -name '*dflash-sglang-box*' > /box/after
        exit 0
        """,
    )
    assert [_lines(box / f"served-{one}") for one in (1, 2, 3)] == [["one"], ["two"], ["one"]]
    (listed,) = json.loads((box / "list").read_text())["services"]
    assert (listed["current"], listed["generations"], listed["state"]) == (1, [1, 2], "active")
    assert listed["stale"] == []
    assert "-  --served-model-name one" in (box / "diff").read_text()
    assert "+  --served-model-name two" in (box / "diff").read_text()
    assert _lines(box / "enabled") == ["enabled"]
    assert "output: the same twice" in (box / "first").read_text()
    assert "nothing of it is left" in (box / "stopped").read_text()
    assert "/etc/systemd/system/dflash-sglang-box.service" in (box / "gone").read_text()
    assert set(_lines(box / "after")) <= set(_lines(box / "before"))


def test_a_generation_that_does_not_serve_gives_way_to_the_one_before(box: Path):
    boot(
        box,
        _START
        + """
        install dies > /box/nothing 2>&1; echo $? >> /box/statuses
        systemctl cat dflash-sglang-box && exit 10
        install one || exit 11
        install dies > /box/died 2>&1; echo $? >> /box/statuses
        served > /box/served-1
        install babbles > /box/babbled 2>&1; echo $? >> /box/statuses
        install grew > /box/grown 2>&1; echo $? >> /box/statuses
        served > /box/served-2
        tool service show box > /box/history
        tool service list --json > /box/list || exit 14
        systemctl stop dflash-sglang-box
        """,
    )
    assert _lines(box / "statuses") == ["1", "1", "1", "1"]
    assert [_lines(box / f"served-{one}") for one in (1, 2)] == [["one"], ["one"]]
    assert "no generation is current" in (box / "nothing").read_text()
    died = (box / "died").read_text()
    assert "did not start" in died
    assert "generation 2 is current, nothing was served for" in died
    assert "and 20,000 MiB were planned" in (box / "grown").read_text()
    assert "an answer is no good" in (box / "babbled").read_text()
    (listed,) = json.loads((box / "list").read_text())["services"]
    assert (listed["current"], listed["generations"]) == (2, [1, 2, 3, 4, 5])
    assert "gone back to 2" in (box / "history").read_text()


def test_killed_while_it_waits_for_a_start_the_next_command_goes_back(box: Path):
    _study(box / "slow", "env.DFLASH_SIM_FAULT=hang:load")
    boot(
        box,
        _START
        + """
        install one || exit 11
        install slow > /box/killed 2>&1 & installing=$!
        for _ in {1..300}; do
          systemctl is-active dflash-sglang-box | grep -qx activating && break; sleep 0.2
        done
        kill -KILL $(pgrep -f 'service install --from /box/slow')
        wait
        tool service list > /box/told
        tool service start box > /box/mended 2>&1 || exit 12
        served > /box/served
        tool service list --json > /box/list
        systemctl stop dflash-sglang-box
        """,
    )
    assert "install goes on, or was cut short" in (box / "told").read_text()
    assert "going back to generation 1" in (box / "mended").read_text()
    assert _lines(box / "served") == ["one"]
    (listed,) = json.loads((box / "list").read_text())["services"]
    assert (listed["current"], listed["cut_short"]) == (1, None)


def test_it_does_not_start_on_an_engine_that_was_changed_below_it(box: Path):
    boot(
        box,
        _START
        + """
        install one || exit 11
        systemctl stop dflash-sglang-box
        cd /box/env/lib/python3.11/site-packages
        mv sglang-0.5.23.dist-info sglang-0.5.24.dist-info
        echo 'Version: 0.5.24' > sglang-0.5.24.dist-info/METADATA
        cd -
        tool service start box > /box/refused 2>&1; echo $? > /box/status
        tool service list > /box/list
        systemctl stop dflash-sglang-box
        """,
    )
    assert _lines(box / "status") == ["1"]
    assert "has SGLang 0.5.24, and the service is for 0.5.23" in (box / "refused").read_text()
    assert "stale: SGLang was 0.5.23 and is 0.5.24" in (box / "list").read_text()


def test_a_key_is_seen_nowhere(box: Path):
    (box / "key.yaml").write_text("api-key: sesame\n")
    (box / "key.yaml").chmod(0o600)
    _study(box / "keyed", "service.api_key_file=/box/key.yaml")
    boot(
        box,
        _START
        + """
        install keyed > /box/said 2>&1 || exit 11
        cat /proc/*/cmdline /proc/*/environ | tr '\\0' ' ' > /box/processes
        systemctl show dflash-sglang-box > /box/shown
        cat /etc/systemd/system/dflash-sglang-box.service > /box/unit
        cp -r /var/lib/dflash-deploy/services/box /box/kept
        systemctl stop dflash-sglang-box
        """,
    )
    kept = [path for path in (box / "kept").rglob("*") if path.is_file()]
    assert len(kept) >= 4
    for public in (*(box / name for name in ("said", "processes", "shown", "unit")), *kept):
        assert "sesame" not in public.read_text(errors="replace")


def test_a_persons_own_service(box: Path):
    boot(
        box,
        _START
        + """
        systemctl start user@0 || exit 10
        export XDG_RUNTIME_DIR=/run/user/0
        tool service install --user --from /box/one --python /box/env/bin/python --name box \\
          --allow-simulated > /box/said 2>&1 || { cat /box/said; exit 11; }
        served > /box/served
        tool service list --user > /box/list
        tool service uninstall --user box || exit 12
        ls ~/.config/systemd/user/dflash-sglang-box.service ~/.local/share/dflash-deploy && exit 13
        exit 0
        """,
    )
    assert _lines(box / "served") == ["one"]
    assert "box: generation 1 of 1, active" in (box / "list").read_text()

"""The health timer in a real systemd: a dead scheduler is restarted after evidence, a living one never."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_deploy.deploy.unit import UnitSpec, render_unit
from dflash_deploy.watch.health.timer import render_timer_units
from tests.real.test_unit_in_systemd import _reason_to_skip, boot, box  # noqa: F401 - a fixture
from tests.simulator.conftest import FOUR_USERS

_ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(_reason_to_skip() is not None, reason=str(_reason_to_skip())),
    pytest.mark.skipif(
        len({Path(place).stat().st_dev for place in ("/", sys.prefix, sys.base_prefix, __file__)}) > 1,
        reason="the tool is not on the root file system, which is all that the box has",
    ),
    pytest.mark.timeout(300),
]

# Named as systemd starts it: the simulator, which looks at /box/fault when it starts.
_ENGINE = f"""#!{sys.executable}
import os, sys
sys.path.insert(0, {str(_ROOT)!r})
try:
    os.environ["DFLASH_SIM_FAULT"] = open("/box/fault").read().strip()
except OSError:
    pass
from dflash_deploy.simulator.__main__ import main
sys.exit(main())
"""


def service(port: int = 30000) -> UnitSpec:
    flags = [*FOUR_USERS.split(), "--enable-metrics", "--host", "127.0.0.1", "--port", str(port)]
    return UnitSpec(
        service="box",
        argv=(sys.executable, "/box/engine.py", *flags),
        host="127.0.0.1",
        port=port,
        env={"DFLASH_SIM_TIME_SCALE": "50"},
        user="root",
    )


def timer_units(manager: str = "system") -> dict[str, str]:
    command = (sys.executable, "-m", "dflash_deploy")
    units = render_timer_units(
        command, manager=manager, every_s=1, timeout_s=6, options=("--checks", "2", "--cool-down", "600")
    )
    # The tool is run from its folder here, and not installed.
    name = "dflash-sglang-health@.service"
    units[name] = units[name].replace("[Service]\n", f"[Service]\nWorkingDirectory={_ROOT}\n")
    return units


def test_a_dead_scheduler_is_restarted_once_and_a_living_one_never(box):  # noqa: F811
    (box / "engine.py").write_text(_ENGINE)
    (box / "dflash-sglang-box.service").write_text(render_unit(service()))
    for name, text in timer_units().items():
        (box / name).write_text(text)
    boot(
        box,
        """
        cp /box/*.service /box/*.timer /run/systemd/system/; rm /run/systemd/system/box.service
        systemctl daemon-reload
        systemd-analyze verify --recursive-errors=yes /run/systemd/system/dflash-sglang-health@box.timer \
          > /box/verified 2>&1
        echo $? >> /box/verified
        unit=dflash-sglang-box
        systemctl start $unit || { journalctl -u $unit; exit 1; }
        systemctl show -p MainPID --value $unit > /box/before
        systemctl start dflash-sglang-health@box.timer || exit 2
        # A few checks of a server that is well.
        for _ in {1..240}; do
          [ "$(journalctl -u dflash-sglang-health@box -o cat | grep -c 'DFLASH ')" -ge 3 ] && break; sleep 0.5
        done
        systemctl show -p MainPID --value $unit > /box/still
        # Now it dies behind its HTTP server, as the next start finds it.
        systemctl stop dflash-sglang-health@box.timer
        echo dead-scheduler > /box/fault
        sed -i 's/^ExecStartPost=.*//' /run/systemd/system/$unit.service
        systemctl daemon-reload; systemctl restart $unit || exit 3
        for _ in {1..240}; do : 2>/dev/null </dev/tcp/127.0.0.1/30000 && break; sleep 0.5; done
        systemctl show -p MainPID --value $unit > /box/dead
        rm /box/fault
        systemctl start dflash-sglang-health@box.timer
        for _ in {1..300}; do
          [ "$(systemctl show -p MainPID --value $unit)" != "$(cat /box/dead)" ] && break; sleep 0.5
        done
        for _ in {1..240}; do
          journalctl -u dflash-sglang-health@box -o cat | tail -n 3 | grep -q 'it serves' && break; sleep 0.5
        done
        systemctl show -p MainPID --value $unit > /box/after
        cp /var/lib/dflash-sglang-health/box.json /box/state
        journalctl -u dflash-sglang-health@box -o cat > /box/journal
        systemctl --failed --plain --no-legend | grep dflash > /box/failed
        systemctl stop dflash-sglang-health@box.timer $unit
        exit 0
        """,
    )
    journal = (box / "journal").read_text()
    assert (box / "verified").read_text() == "0\n"
    assert (box / "before").read_text() == (box / "still").read_text()
    assert (box / "after").read_text() != (box / "dead").read_text(), journal
    assert journal.count("restarting dflash-sglang-box.service") == 1, journal
    assert "scheduler: its counters stand still" in journal
    assert "nothing to do: it serves" in journal
    (made,) = json.loads((box / "state").read_text())["restarts"]
    assert "2 checks in a row found it dead" in made["why"]
    assert (box / "failed").read_text() == ""


def test_in_a_persons_own_manager_a_slow_start_is_waited_for_and_a_dead_scheduler_restarted(box):  # noqa: F811
    (box / "engine.py").write_text(_ENGINE)
    spec = replace(service(), manager="user", user=None)
    (box / "dflash-sglang-box.service").write_text(render_unit(spec))
    for name, text in timer_units("user").items():
        (box / name).write_text(text)
    boot(
        box,
        """
        unit=dflash-sglang-box
        systemctl start user@0 || exit 1
        export XDG_RUNTIME_DIR=/run/user/0
        units=$XDG_RUNTIME_DIR/systemd/user; mkdir -p $units
        cp /box/dflash-* $units/
        systemctl --user daemon-reload
        checks() { journalctl --user-unit dflash-sglang-health@box -o cat | grep -c 'DFLASH '; }
        # A start that takes its time: checks go on, and nothing is restarted.
        echo hang:load > /box/fault
        systemctl --user start --no-block $unit
        systemctl --user start dflash-sglang-health@box.timer || exit 2
        for _ in {1..120}; do
          systemctl --user show -p MainPID --value $unit > /box/slow
          [ "$(cat /box/slow)" != 0 ] && break; sleep 0.5
        done
        for _ in {1..240}; do [ "$(checks)" -ge 4 ] && break; sleep 0.5; done
        checks > /box/checks
        systemctl --user show -p MainPID --value $unit > /box/still
        systemctl --user stop dflash-sglang-health@box.timer $unit
        # One that is dead behind its HTTP server.
        echo dead-scheduler > /box/fault
        sed -i 's/^ExecStartPost=.*//' $units/$unit.service
        systemctl --user daemon-reload; systemctl --user start $unit || exit 3
        for _ in {1..240}; do : 2>/dev/null </dev/tcp/127.0.0.1/30000 && break; sleep 0.5; done
        systemctl --user show -p MainPID --value $unit > /box/dead
        systemctl --user start dflash-sglang-health@box.timer
        for _ in {1..300}; do
          [ "$(systemctl --user show -p MainPID --value $unit)" != "$(cat /box/dead)" ] && break; sleep 0.5
        done
        systemctl --user show -p MainPID --value $unit > /box/after
        journalctl --user-unit dflash-sglang-health@box -o cat > /box/journal
        systemctl --user stop dflash-sglang-health@box.timer $unit
        exit 0
        """,
    )
    journal = (box / "journal").read_text()
    assert int((box / "checks").read_text()) >= 4
    assert (box / "still").read_text() == (box / "slow").read_text() != "0\n", journal
    assert "nothing to do: it starts" in journal
    assert (box / "after").read_text() != (box / "dead").read_text(), journal
    assert journal.count("restarting dflash-sglang-box.service") == 1, journal

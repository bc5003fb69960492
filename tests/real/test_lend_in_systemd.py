"""``tune --stop-service`` under a real systemd: a service is stopped with leave, and comes back in any case.

The card is the stand-in driver's, which says that the service's process computes on it; study and servers are
simulated.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.machine.nvml_stub import StubCard, StubProcess, build_stub, stub_env

from .box import WITH_TOOL, boot, make_environment, why_no_tool
from .test_service_in_systemd import study

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(why_no_tool() is not None, reason=str(why_no_tool())),
    pytest.mark.timeout(300),
]

# The command as it is, but that the simulated study counts the stand-in driver's first card as its own.
_TUNE = """
import sys
from dataclasses import replace
from dflash_deploy.tune import opening
simulated = opening.simulated_rig
opening.simulated_rig = lambda *arguments: replace(simulated(*arguments), index=0)
from dflash_deploy.__main__ import main
sys.exit(main())
"""
_PID = 4_000_000_000


def test_a_service_on_the_card_is_stopped_with_leave_and_comes_back_whatever_happens(tmp_path: Path):
    box = tmp_path / "box"
    make_environment(box)
    study(box / "one", time_scale=100)
    (box / "tune.py").write_text(_TUNE)
    library = build_stub(box / "stub")
    scenario = Path(stub_env(library, StubCard(processes=[StubProcess(_PID, 29_000)]))["NVML_STUB_SCENARIO"])
    scenario.rename(box / "card")
    boot(
        box,
        WITH_TOOL
        + f"""
        tool service install --from /box/one --python /box/env/bin/python --name box --allow-simulated \\
          --no-timer > /box/said 2>&1 || {{ cat /box/said; exit 11; }}
        tune() {{ exec {sys.executable} /box/tune.py tune --simulate rtx-5090 --time-scale 200 "$@"; }}
        on_card() {{ sed "s/{_PID}/$(main_pid)/" /box/card > /box/card-now; }}
        export LD_LIBRARY_PATH=/box/stub NVML_STUB_SCENARIO=/box/card-now
        stopped() {{ systemctl is-active $unit | grep -qx inactive; }}
        trying() {{ stopped && pgrep -f dflash_deploy.simulator; }}
        lent=~/.local/state/dflash-deploy/lent

        on_card; first=$(main_pid)
        (tune --trials 1) > /box/refused 2>&1; echo $? >> /box/statuses
        (tune --trials 1 --detach) >> /box/refused 2>&1; echo $? >> /box/statuses
        [ $first = $(main_pid) ] || exit 12

        (tune --trials 1 --stop-service) > /box/done 2>&1 & tuner=$!
        until_ 30 trying || exit 13
        wait $tuner; echo $? >> /box/statuses
        served >> /box/served; on_card

        (tune --stop-service) > /box/interrupted 2>&1 & tuner=$!
        until_ 30 trying || exit 14
        kill -INT $tuner; sleep 0.3; kill -INT $tuner; wait $tuner; echo $? >> /box/statuses
        served >> /box/served; on_card

        (tune --stop-service) > /box/killed 2>&1 & tuner=$!
        until_ 30 trying || exit 15
        kill -KILL $tuner; wait $tuner; echo $? >> /box/statuses
        stopped && ls $lent/*.json > /dev/null || exit 16
        (tune no-such-profile) > /box/next 2>&1
        served >> /box/served
        ls $lent/*.json 2> /dev/null && exit 17
        pgrep -f dflash_deploy.simulator | grep -vx $(main_pid) && exit 18
        systemctl stop $unit
        exit 0
        """,
        within_s=200,
    )
    assert (box / "statuses").read_text().split() == ["5", "5", "0", "130", "137"]
    refused = (box / "refused").read_text()
    assert refused.count("dflash-sglang-box.service is running on this card") == 2
    assert "--stop-service" in refused
    assert (box / "served").read_text().split() == ["one"] * 3
    for told in ("done", "interrupted", "killed"):
        assert "stopping dflash-sglang-box.service" in (box / told).read_text(), told
    for told in ("done", "interrupted", "next"):
        assert "dflash-sglang-box.service is started again" in (box / told).read_text(), told

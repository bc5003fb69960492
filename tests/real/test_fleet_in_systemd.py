"""An engine for each of two cards behind SGLang's own router, from PyPI, under a real systemd in a box."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dflash_deploy.serving_env import router as router_env

from .box import WITH_TOOL, boot, make_environment, why_no_tool
from .environment import serving_environment
from .test_service_in_systemd import study

# Looked up here, before the tests' own folders take the place of the person's.
_KEPT = serving_environment().folder.parent

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(why_no_tool() is not None, reason=str(why_no_tool())),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def router_python() -> Path:
    """The router's environment, made by the tool once and kept beside SGLang's."""
    python = router_env.make(_KEPT, say=print)
    assert router_env.version_of(python) == router_env.VERSION
    return python


def test_requests_go_on_when_an_engine_dies_and_it_is_taken_in_again(tmp_path: Path, router_python: Path):
    box = tmp_path / "box"
    make_environment(box)
    (box / "key.yaml").write_text("api-key: sesame-opens\n")
    (box / "key.yaml").chmod(0o600)
    study(box / "keyed", "service.api_key_file=/box/key.yaml", "service.host=0.0.0.0")
    study(box / "dies", "service.api_key_file=/box/key.yaml", "env.DFLASH_SIM_FAULT=die:load")
    shutil.copytree(router_python.parents[1], box / "router", symlinks=True)
    (box / "ask.sh").write_text(
        "for _ in $(seq $1); do curl -s -m 30 -o /dev/null -w '%{http_code}\\n' "
        "-H 'Content-Type: application/json' -H \"Authorization: Bearer $2\" "
        '-d \'{"model": "keyed", "prompt": "one two three", "max_tokens": 4}\' '
        "http://127.0.0.1:30000/v1/completions; done\n"
    )
    boot(
        box,
        WITH_TOOL
        + """
        install() { tool service install --from /box/$1 --python /box/env/bin/python --name box \\
          --allow-simulated --gpus 0,1 --router --router-python /box/router/bin/python "${@:2}"; }
        ask() { bash /box/ask.sh $1 sesame-opens; }
        workers() { curl -s http://127.0.0.1:30000/readiness; }
        requests() { journalctl -u dflash-sglang-box-gpu$1 -o cat | grep -c 'POST /v1/completions'; }
        install keyed --dry-run > /box/dry 2>&1 || exit 10
        install keyed > /box/said 2>&1 || { cat /box/said; exit 11; }
        tool service list --json > /box/list
        until_ 30 sh -c 'curl -s http://127.0.0.1:30000/readiness | grep -q "healthy_workers\\":2"' || exit 12
        for gpu in 0 1; do
          tr '\\0' '\\n' < /proc/$(main_pid dflash-sglang-box-gpu$gpu)/environ | grep -E '^CUDA_[DV]' | sort
        done > /box/cards
        ask 6 > /box/asked-1
        bash /box/ask.sh 1 wrong > /box/refused
        cat /proc/*/cmdline /proc/*/environ 2>/dev/null | tr '\\0' ' ' > /box/processes
        # Nothing is let in to the engines from elsewhere.
        ss -Hltn | grep -E ':3000[0-9]' | awk '{print $4}' | sort > /box/listening

        # The engine that has the prompt in its cache dies; it stays away for a while.
        first=0; [ $(requests 1) -le $(requests 0) ] || first=1
        slow=/run/systemd/system/dflash-sglang-box-gpu$first.service.d
        mkdir -p $slow; printf '[Service]\\nRestartSec=4s\\n' > $slow/slow.conf
        systemctl daemon-reload
        kill -KILL $(main_pid dflash-sglang-box-gpu$first)
        ask 8 > /box/asked-2
        echo $(requests $((1 - first))) > /box/other
        until_ 60 sh -c 'curl -s http://127.0.0.1:30000/readiness | grep -q "healthy_workers\\":2"' || exit 13
        before=$(requests $first)
        until_ 60 eval "ask 2 >> /box/asked-3; [ \\$(requests $first) -gt $before ]" || exit 14
        tool health box-router --timeout 5 > /box/health || exit 15
        tool status box-router > /box/status || exit 16

        # A new generation that does not serve: the first card goes back, the others are not touched.
        other=$(main_pid dflash-sglang-box-gpu1)
        install dies > /box/died 2>&1; echo $? > /box/died-status
        [ "$(main_pid dflash-sglang-box-gpu1)" = $other ] || exit 17
        ask 4 > /box/asked-4
        journalctl --no-pager > /box/journal
        tool service stop box > /box/stopped || exit 18
        tool service uninstall box > /box/gone || exit 20
        ls /etc/systemd/system/dflash-sglang-* /var/lib/dflash-deploy/services 2>/dev/null && exit 21
        exit 0
        """,
        within_s=240,
    )
    listed = json.loads((box / "list").read_text())["services"]
    assert [one["name"] for one in listed] == ["box-gpu0", "box-gpu1", "box-router"]
    assert [one["generation"]["port"] for one in listed] == [30001, 30002, 30000]
    assert (box / "cards").read_text().split() == [
        "CUDA_DEVICE_ORDER=PCI_BUS_ID", "CUDA_VISIBLE_DEVICES=0",
        "CUDA_DEVICE_ORDER=PCI_BUS_ID", "CUDA_VISIBLE_DEVICES=1",
    ]  # fmt: skip
    asked = [(box / f"asked-{number}").read_text().split() for number in (1, 2, 3, 4)]
    assert {status for answers in asked for status in answers} == {"200"}
    assert (box / "refused").read_text().split() == ["401"]
    listening = (box / "listening").read_text().split()
    assert listening == ["0.0.0.0:30000", "127.0.0.1:30001", "127.0.0.1:30002", "127.0.0.1:30003"]
    assert int((box / "other").read_text()) >= 8
    assert "DFLASH OK" in (box / "health").read_text()
    assert "the router in front of the engines" in " ".join((box / "status").read_text().split())
    assert (box / "died-status").read_text() == "1\n"
    assert "generation 1 is current" in (box / "died").read_text()
    for seen in ("said", "processes", "journal", "health", "dry"):
        assert "sesame" not in (box / seen).read_text(errors="replace"), seen
    assert (box / "gone").read_text().count("is taken away") == 3

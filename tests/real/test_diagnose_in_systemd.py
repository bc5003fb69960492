"""The journal of a unit that died, read by ``diagnose --unit`` in a box with a real systemd."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.diagnosis import logs

from .box import boot, why_no_box, why_no_tool

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(why_no_box() is not None, reason=str(why_no_box())),
    pytest.mark.skipif(why_no_tool() is not None, reason=str(why_no_tool())),
    pytest.mark.timeout(300),
]

_UNIT = """
[Service]
ExecStart=/bin/bash -c 'cat /box/{log}; exit {status}'
"""
_NO_KV = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."


def test_a_unit_is_diagnosed_by_its_journal(tmp_path: Path):
    tmp_path.chmod(0o755)
    (tmp_path / "fails.log").write_text("\n".join(logs.failed(_NO_KV, "sizing")) + "\n")
    (tmp_path / "serves.log").write_text("\n".join(logs.boot("serving")) + "\n")
    for name, status in (("fails", 1), ("serves", 0)):
        (tmp_path / f"dflash-{name}.service").write_text(_UNIT.format(log=f"{name}.log", status=status))
    python = f"{sys.executable} -m dflash_deploy"
    boot(
        tmp_path,
        f"""
        cp /box/*.service /run/systemd/system/ && systemctl daemon-reload
        systemctl start dflash-fails dflash-serves
        for try in $(seq 100); do
            systemctl is-active -q dflash-fails dflash-serves || break
            sleep 0.1
        done
        journalctl --sync
        cd {Path(__file__).parents[2]}
        {python} diagnose --unit dflash-fails --json > /box/fails.json; [ $? = 1 ] || exit 1
        {python} diagnose --unit dflash-fails > /box/fails.txt; [ $? = 1 ] || exit 2
        {python} diagnose --unit dflash-serves.service --json > /box/serves.json || exit 3
        {python} diagnose --unit no-such-unit 2> /box/none; [ $? = 4 ] || exit 4
        """,
    )
    found = json.loads((tmp_path / "fails.json").read_text())
    assert found[0]["id"] == "no-kv-memory"
    assert any("Not enough memory" in line["text"] for line in found[0]["lines"])
    assert (tmp_path / "fails.txt").read_text().startswith("root cause: no-kv-memory")
    served = json.loads((tmp_path / "serves.json").read_text())
    assert [one["id"] for one in served if one["severity"] == "error"] == []
    assert "no-such-unit" in (tmp_path / "none").read_text()

"""A service in operation, under a real systemd in a box: what is mended, what is left alone, what is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .box import WITH_TOOL, boot, make_environment, why_no_tool
from .test_service_in_systemd import study

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(why_no_tool() is not None, reason=str(why_no_tool())),
    pytest.mark.timeout(400),
]

_LISTENER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with open("/box/posted", "ab") as file:
            file.write(body + b"\\n")
        self.send_response(500)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", 8088), Handler).serve_forever()
"""

# Prompts that each take a while to be read, so that a health check's own request has to wait.
_BUSY = """
import concurrent.futures, json, sys, time, urllib.request
end = time.monotonic() + float(sys.argv[1])
def ask(number):
    while time.monotonic() < end:
        prompt = " ".join(f"{number}-{place}" for place in range(2500))
        body = {"text": prompt, "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
        request = urllib.request.Request("http://127.0.0.1:30000/generate", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=60).read()
        number += 100
with concurrent.futures.ThreadPoolExecutor(64) as pool:
    list(pool.map(ask, range(64)))
"""


def test_what_dies_is_restarted_and_told_and_what_takes_its_time_is_left_alone(tmp_path: Path):
    box = tmp_path / "box"
    make_environment(box)
    (box / "listener.py").write_text(_LISTENER)
    (box / "busy.py").write_text(_BUSY)
    (box / "hook").write_text("#!/bin/sh\ncat >> /box/told; echo >> /box/told\n")
    (box / "hook").chmod(0o755)
    (box / "told").touch()
    told = 'service.notify={command: ["/box/hook"], url: "http://127.0.0.1:8088/x", every_s: 0.0}'
    flags = {"enable-metrics": True}
    study(box / "one", told, **flags)
    too_much = {"mem-fraction-static": 0.97, "max-running-requests": 8}
    study(box / "oom", told, time_scale=200, **flags, **too_much)
    boot(
        box,
        WITH_TOOL
        + """
        install() { tool service install --from /box/$1 --python /box/env/bin/python --name box \\
          --allow-simulated "${@:2}"; }
        checks() { said | grep -c 'DFLASH '; }
        more_checks() { local wanted=$(($(checks) + $1)); until_ 120 eval "[ \\$(checks) -ge $wanted ]"; }
        /usr/bin/python3 /box/listener.py 2>/dev/null & listener=$!
        install one > /box/said 2>&1 || { cat /box/said; exit 10; }
        hasten
        more_checks 1 || exit 11
        main_pid > /box/pids

        # A crash is systemd's to mend.
        kill -KILL $(main_pid)
        until_ 30 sh -c 'grep -q restarted /box/told' || exit 12
        until_ 30 served || exit 13
        main_pid >> /box/pids

        # A start that takes three minutes, by the simulated clock; then prompts that keep it busy.
        printf 'DFLASH_SIM_TIME_SCALE=12\\nDFLASH_SIM_FAULT=slow-start:3\\n' > /box/env-30000
        systemctl restart $timer.timer
        before=$(checks); began=$(date +%s%N)
        systemctl restart $unit || exit 14
        echo $(( ($(date +%s%N) - began) * 12 / 1000000000 )) > /box/start-took-simulated-s
        echo $(($(checks) - before)) > /box/checks-while-starting
        main_pid >> /box/pids
        tool health box --layers > /box/quiet
        /usr/bin/python3 /box/busy.py 6 & busy=$!
        sleep 1; tool health box --timeout 2 --json > /box/busy
        more_checks 2 || exit 15
        wait $busy || exit 16
        main_pid >> /box/pids

        # Its scheduler dies behind an HTTP server that goes on answering.
        printf 'DFLASH_SIM_FAULT=dead-scheduler\\n' > /box/env-30000
        unready; systemctl restart $unit || exit 17
        main_pid >> /box/pids
        until_ 30 served || exit 25
        curl -s -o /dev/null -w '%{http_code}\\n' http://127.0.0.1:30000/v1/models > /box/http
        rm /box/env-30000; rm -r /run/systemd/system/$unit.service.d; systemctl daemon-reload
        until_ 120 sh -c "journalctl -u $timer -o cat | grep -q 'restarting $unit'" || exit 18
        until_ 120 sh -c 'grep -q recovered /box/told' || exit 19
        main_pid >> /box/pids
        cp /var/lib/dflash-sglang-health/box.json /box/state

        # A configuration that does not fit its card.
        install oom --no-start > /dev/null 2>&1 || exit 20
        systemctl stop $unit; systemctl start --no-block $unit
        until_ 120 systemctl is-failed $unit || exit 21
        until_ 120 sh -c 'tail -n 4 /box/told | grep -q "\\"event\\": \\"down\\""' || exit 22
        tool status box > /box/status; tool health box > /box/health; echo $? >> /box/health
        tool service rollback box 1 > /box/back 2>&1 || exit 23
        until_ 120 sh -c 'tail -n 2 /box/told | grep -q recovered' || exit 24
        tool status box --json > /box/status.json
        said > /box/journal
        systemctl --failed --plain --no-legend | grep dflash > /box/failed
        kill $listener
        systemctl stop $timer.timer $unit
        exit 0
        """,
        within_s=300,
    )
    journal = (box / "journal").read_text()
    first, crashed, slow, busy, dead, restarted = (box / "pids").read_text().split()
    assert first != crashed
    # Slow and busy is no reason to restart.
    assert slow == busy
    assert int((box / "start-took-simulated-s").read_text()) > 100
    assert int((box / "checks-while-starting").read_text()) >= 2
    assert "nothing to do: it starts" in journal
    waited = json.loads((box / "busy").read_text())
    assert waited["verdict"] in ("ok", "warning")
    assert "it waits behind other requests, which go on" in json.dumps(waited)
    assert (box / "http").read_text() == "200\n"
    assert dead != restarted
    assert journal.count("restarting dflash-sglang-box.service") == 1, journal
    assert "scheduler: its counters stand still" in journal
    (made,) = json.loads((box / "state").read_text())["restarts"]
    assert "2 checks in a row found it dead" in made["why"]
    status = " ".join((box / "status").read_text().split())
    assert "CUDA out of memory" in status
    assert "after 6 starts that failed, systemd starts it no more" in status
    assert "dflash-deploy diagnose --unit dflash-sglang-box.service" in status
    assert (box / "health").read_text().splitlines()[-1] == "2"
    (server,) = json.loads((box / "status.json").read_text())["servers"]
    assert (server["health"], server["generation"]) == ("healthy", 1)
    assert {"tokens_per_s", "kv_usage"} <= {one["name"] for one in server["history"]}
    told_events = [json.loads(line)["event"] for line in (box / "told").read_text().splitlines() if line]
    assert told_events[:1] == ["restarted"]
    assert told_events[-1] == "recovered"
    assert "down" in told_events
    # The same by HTTP, where the answer was an error, which nothing minded.
    posted = [json.loads(line)["event"] for line in (box / "posted").read_text().splitlines()]
    assert posted == told_events
    assert "nobody was told: the address of the hook answered 500" in journal
    assert (box / "failed").read_text() == ""

"""Services as a person installs them, under a real systemd in a box; the engine is the simulator."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.deploy.test_emit import measurement, trial, write_study

from .box import WITH_TOOL, boot, make_environment, why_no_tool

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(why_no_tool() is not None, reason=str(why_no_tool())),
    pytest.mark.timeout(300),
]

_START = (
    WITH_TOOL
    + """
install() { local study=$1; shift
  tool service install --from /box/$study --python /box/env/bin/python --name box --allow-simulated "$@"; }
find_all() { find / -xdev -not -path '/proc/*' -not -path '/box/*' \\
  \\( -name '*dflash-sglang-*' -o -path '*/dflash-deploy/*' \\); }
find_all > /box/before
"""
)


@pytest.fixture
def box(tmp_path: Path) -> Path:
    folder = tmp_path / "box"
    make_environment(folder)
    study(folder / "one")
    return folder


def study(
    folder: Path, *overrides: str, vram_used_mib: int = 31_000, time_scale: int = 20, **flags: object
) -> None:
    """A tuned configuration. Where health is checked, its clock must not run so fast that it answers late."""
    env = ("env.DFLASH_SIM_CARD=rtx-5090", f'env.DFLASH_SIM_TIME_SCALE="{time_scale}"')
    measured = replace(measurement(100.0), vram_used_mib=vram_used_mib)
    chosen = {
        "model-path": "qwen3.8-27b-nvfp4",
        "served-model-name": folder.name,
        "mem-fraction-static": 0.85,
        "max-running-requests": 1,
        "context-length": 8192,
        **flags,
    }
    best = trial(0, 100.0, flags=chosen, measured=measured)
    write_study(folder, best, simulated=True, overrides=(*env, *overrides))


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_installed_replaced_taken_back_booted_again_and_taken_away(box: Path):
    study(box / "one", time_scale=100)
    study(box / "two", time_scale=100)
    for place in ("etc+systemd+system", "var+lib+dflash-deploy"):
        (box / "kept" / place).mkdir(parents=True)
    boot(
        box,
        _START
        + """
        install one > /box/first 2>&1 || { cat /box/first; exit 11; }
        served > /box/served-1
        install two --json > /box/second 2>/box/second-said || exit 12
        served > /box/served-2
        tool service rollback box > /box/back 2>&1 || exit 13
        served > /box/served-3
        tool service list --json > /box/list || exit 14
        tool service diff box 1 2 > /box/diff || exit 15
        systemctl is-enabled $unit $timer.timer > /box/enabled
        systemctl is-active $timer.timer >> /box/enabled
        tool service stop box > /box/stopped || exit 16
        tool service start box > /box/started || exit 17
        cp /box/before /box/before-all
        """,
    )
    assert [_lines(box / f"served-{one}") for one in (1, 2, 3)] == [["one"], ["two"], ["one"]]
    (listed,) = json.loads((box / "list").read_text())["services"]
    assert (listed["current"], listed["generations"], listed["state"]) == (1, [1, 2], "active")
    assert listed["stale"] == []
    assert "-  --served-model-name one" in (box / "diff").read_text()
    assert "+  --served-model-name two" in (box / "diff").read_text()
    assert _lines(box / "enabled") == ["enabled", "enabled", "active"]
    assert "output: the same twice" in (box / "first").read_text()
    assert "nothing of it is left" in (box / "stopped").read_text()
    second = json.loads((box / "second").read_text())
    assert (second["generation"], second["ok"]) == (2, True)
    assert second["outage_s"] > 0
    # Another boot of the machine, which has kept what was written: nobody starts anything by hand.
    boot(
        box,
        _START
        + """
        systemctl start --no-block multi-user.target timers.target
        until_ 60 served || exit 11
        served > /box/served-4
        systemctl is-active $timer.timer > /box/enabled
        tool status box > /box/status || exit 12
        tool service uninstall box > /box/gone || exit 13
        rm -rf /var/cache/$unit /var/cache/private/$unit /var/lib/dflash-deploy/router*
        systemctl cat $unit $timer.timer $timer.service 2>/dev/null | grep . && exit 14
        ls -d /var/lib/dflash-deploy/services && exit 15
        find_all > /box/after
        exit 0
        """,
    )
    assert _lines(box / "served-4") == ["one"]
    assert _lines(box / "enabled") == ["active"]
    assert "box: healthy (simulated)" in (box / "status").read_text()
    assert "/etc/systemd/system/dflash-sglang-box.service" in (box / "gone").read_text()
    assert set(_lines(box / "after")) <= set(_lines(box / "before-all"))


def test_a_generation_that_does_not_serve_gives_way_and_a_command_that_is_killed_is_mended(box: Path):
    (box / "hook").write_text("#!/bin/sh\ncat >> /box/told; echo >> /box/told\n")
    (box / "hook").chmod(0o755)
    study(box / "one", 'service.notify={command: ["/box/hook"]}', time_scale=100)
    study(box / "dies", "env.DFLASH_SIM_FAULT=die:load", time_scale=100)
    study(box / "babbles", "env.DFLASH_SIM_FAULT=repeat", time_scale=100)
    study(box / "grew", vram_used_mib=20_000, time_scale=100)
    study(box / "hangs", "env.DFLASH_SIM_FAULT=hang:load")
    boot(
        box,
        _START
        + """
        install dies > /box/nothing 2>&1; echo $? >> /box/statuses
        systemctl cat $unit 2>/dev/null && exit 10
        ls /etc/systemd/system/dflash-sglang-* 2>/dev/null && exit 11
        install one || exit 12
        for study in dies babbles grew; do
          install $study > /box/$study-said 2>&1; echo $? >> /box/statuses
        done
        served > /box/served-1
        tool service show box > /box/history
        tool service list --json > /box/list || exit 14
        # Killed while it waits for a start that hangs.
        install hangs > /box/killed 2>&1 & installing=$!
        until_ 60 sh -c 'systemctl is-active dflash-sglang-box | grep -qx activating' || exit 15
        until_ 60 test -e /var/lib/dflash-deploy/services/box/change.json
        tool health box --act --timeout 3 > /box/hands-off
        kill -KILL $(pgrep -f 'service install --from /box/hangs')
        wait
        tool service list > /box/told-cut-short
        tool service start box > /box/mended 2>&1 || exit 16
        served > /box/served-2
        tool service list --json > /box/list-2
        # The engine is changed below it.
        tool service stop box || exit 17
        cd /box/env/lib/python3.11/site-packages
        mv sglang-0.5.23.dist-info sglang-0.5.24.dist-info
        echo 'Version: 0.5.24' > sglang-0.5.24.dist-info/METADATA
        cd - > /dev/null
        tool service start box > /box/refused 2>&1; echo $? >> /box/statuses
        tool service list > /box/list-3
        tool status box > /box/status
        # Killed while it takes away.
        tool service uninstall box > /box/gone 2>&1 &
        sleep 0.8; kill -KILL $(pgrep -f 'service uninstall'); wait
        tool service uninstall box >> /box/gone 2>&1
        ls /etc/systemd/system/dflash-sglang-* /var/lib/dflash-deploy/services 2>/dev/null && exit 18
        exit 0
        """,
    )
    assert _lines(box / "statuses") == ["1", "1", "1", "1", "1"]
    assert [_lines(box / f"served-{one}") for one in (1, 2)] == [["one"], ["one"]]
    assert "no generation is current" in (box / "nothing").read_text()
    died = (box / "dies-said").read_text()
    assert "did not start" in died
    assert "generation 2 is current, nothing was served for" in died
    assert "s (measured)" in died
    assert "and 20,000 MiB were planned" in (box / "grew-said").read_text()
    assert "an answer is no good" in (box / "babbles-said").read_text()
    (listed,) = json.loads((box / "list").read_text())["services"]
    assert (listed["current"], listed["generations"]) == (2, [1, 2, 3, 4, 5])
    assert "gone back to 2" in (box / "history").read_text()
    told = [json.loads(line) for line in _lines(box / "told") if line]
    assert {one["event"] for one in told} == {"rolled back"}
    assert len(told) == 3
    assert "generation 3 does not serve" in told[0]["why"]
    assert "nothing is done: install of generation 6 is under way" in (box / "hands-off").read_text()
    assert "install goes on, or was cut short" in (box / "told-cut-short").read_text()
    assert "going back to generation 2" in (box / "mended").read_text()
    (listed,) = json.loads((box / "list-2").read_text())["services"]
    assert (listed["current"], listed["cut_short"]) == (2, None)
    assert "has SGLang 0.5.24, and the service is for 0.5.23" in (box / "refused").read_text()
    assert "stale: SGLang was 0.5.23 and is 0.5.24" in (box / "list-3").read_text()
    status = " ".join((box / "status").read_text().split())
    assert "generation 2 is stale: SGLang was 0.5.23 and is 0.5.24" in status
    assert "dflash-deploy tune, then dflash-deploy service install --name box" in status


def test_a_full_disk_takes_down_nothing_and_a_proxy_of_the_manager_is_no_trouble(box: Path):
    study(box / "one", time_scale=100)
    study(box / "two", time_scale=100)
    boot(
        box,
        _START
        + """
        systemctl set-environment HTTP_PROXY=http://127.0.0.1:9 NO_PROXY=.corp
        mkdir -p /var/lib/dflash-deploy
        mount -t tmpfs -o size=3m tmpfs /var/lib/dflash-deploy || exit 10
        fill() { dd if=/dev/zero of=/var/lib/dflash-deploy/filled bs=4k 2>/dev/null; true; }
        install one > /box/first 2>&1 || { cat /box/first; exit 11; }
        tr '\\0' '\\n' < /proc/$(main_pid)/environ | grep -i proxy | sort > /box/environ
        main_pid > /box/pids
        fill
        install two > /box/full 2>&1; echo $? > /box/statuses
        main_pid >> /box/pids
        rm /var/lib/dflash-deploy/filled
        # It fills up while the next one starts.
        install two > /box/filled 2>&1 & installing=$!
        until_ 60 test -e /var/lib/dflash-deploy/services/box/change.json || exit 12
        fill
        wait $installing; echo $? >> /box/statuses
        served > /box/served
        rm /var/lib/dflash-deploy/filled
        tool service rollback box > /box/back 2>&1; echo $? >> /box/statuses
        served >> /box/served
        ls -A /var/lib/dflash-deploy/services/box > /box/left
        tool service uninstall box > /box/gone 2>&1
        umount /var/lib/dflash-deploy
        exit 0
        """,
    )
    assert _lines(box / "environ") == [
        "HTTP_PROXY=http://127.0.0.1:9",
        "NO_PROXY=.corp,127.0.0.1,localhost",
        "no_proxy=.corp,127.0.0.1,localhost",
    ]
    before, after = _lines(box / "pids")
    assert before == after != "0"
    assert "No space left on device; what runs was left alone" in (box / "full").read_text()
    assert _lines(box / "statuses") == ["5", "0", "0"], (box / "filled").read_text()
    assert _lines(box / "served") == ["two", "one"]
    assert _lines(box / "left") == ["current", "generations", "history.jsonl"]


def test_a_key_is_seen_nowhere_and_health_has_it_all_the_same(box: Path):
    (box / "key.yaml").write_text("api-key: sesame-opens\n")
    (box / "key.yaml").chmod(0o600)
    study(box / "keyed", "service.api_key_file=/box/key.yaml")
    boot(
        box,
        _START
        + """
        # An environment that the service's account cannot enter is told before anything is written.
        mkdir -m 700 /opt/closed; cp -r /box/env /opt/closed/
        install keyed --python /opt/closed/env/bin/python > /box/closed 2>&1; echo $? > /box/status
        ls -d /var/lib/dflash-deploy/services 2>/dev/null && exit 10
        eval "$(sed -n 's/^  fix: //p' /box/closed | sed 's/; or install.*//')" || exit 19
        install keyed --python /opt/closed/env/bin/python --dry-run > /dev/null || exit 20
        install keyed > /box/said 2>&1 || { cat /box/said; exit 11; }
        cat /proc/*/cmdline /proc/*/environ 2>/dev/null | tr '\\0' ' ' > /box/processes
        systemctl show $unit > /box/shown
        cat /etc/systemd/system/$unit.service > /box/unit
        cp -r /var/lib/dflash-deploy/services/box /box/service
        served && exit 12
        hasten
        systemctl start $timer.service
        said > /box/health
        tool status box > /box/status-said
        systemctl restart $unit || exit 13
        journalctl --no-pager > /box/journal
        # Whatever else was written and others may read, in all of the file system.
        find / -xdev -type f -perm /044 -newer /box/run -not -path '/proc/*' -not -path '/sys/*' \\
          -not -path '/box/*' -exec grep -l sesame-opens {} + > /box/readable 2>/dev/null
        systemctl stop $unit
        exit 0
        """,
    )
    assert _lines(box / "status") == ["5"]
    assert "may not read SGLang's environment: /opt/closed" in (box / "closed").read_text()
    public = [box / name for name in ("said", "processes", "shown", "unit", "health", "journal", "readable")]
    kept = [path for path in (box / "service").rglob("*") if path.is_file()]
    assert len(kept) >= 4
    for path in (*public, *kept, box / "status-said"):
        assert "sesame" not in path.read_text(errors="replace"), path
    assert "server_args={" in (box / "journal").read_text()
    assert "'api_key': '(the API key)'" in (box / "journal").read_text()
    # The check runs in its own sandbox, and has a token of the server.
    assert "DFLASH OK" in (box / "health").read_text()
    assert (
        "one token came" in (box / "health").read_text()
        or "generation_answer" in (box / "health").read_text()
    )
    assert "box: healthy (simulated)" in (box / "status-said").read_text()


def test_a_model_in_a_persons_cache_is_served_from_there_once_the_service_may_read_it(box: Path):
    # As another person's study has it, and in the home folder that a person has today.
    study(box / "hub", time_scale=100, **{"model-path": "org/model"})
    boot(
        box,
        _START
        + """
        useradd --create-home person; chmod 700 /home/person
        cache=/home/person/.cache/huggingface
        repository=$cache/hub/models--org--model
        commit=0123456789abcdef0123456789abcdef01234567
        snapshot=$repository/snapshots/$commit
        mkdir -p $repository/{blobs,refs} $snapshot
        printf $commit > $repository/refs/main
        for name in config.json model.safetensors; do
          echo '{}' > $repository/blobs/$name; chmod 600 $repository/blobs/$name
          ln -s ../../blobs/$name $snapshot/$name
        done
        chown -R person: /home/person
        export SUDO_USER=person
        install hub > /box/closed 2>&1; echo $? > /box/status
        ls -d /var/lib/dflash-deploy/services 2>/dev/null && exit 10
        install hub --run-as person > /box/person 2>&1 || { cat /box/person; exit 11; }
        ps -o user= -p $(main_pid) > /box/users
        eval "$(sed -n 's/^  fix: //p' /box/closed | sed 's/; or install.*//')" || exit 12
        install hub > /box/said 2>&1 || { cat /box/said; exit 13; }
        served > /box/served
        journalctl -u $unit -o cat | grep '^read' > /box/read
        # The cache is another's: the service cannot change it.
        find $cache -newer /box/closed -not -user person > /box/changed
        systemctl stop $unit
        exit 0
        """,
    )
    assert _lines(box / "status") == ["5"]
    closed = " ".join((box / "closed").read_text().split())
    assert "may not read the model org/model: /home/person" in closed
    assert "or install it with --run-as person" in closed
    assert _lines(box / "users") == ["person"]
    assert _lines(box / "served") == ["hub"]
    read = _lines(box / "read")
    assert len({line.split()[-1] for line in read}) == 2, "the person, then the user that systemd makes"
    assert all("bytes of 2 files in /home/person/.cache/huggingface/hub" in line for line in read)
    assert _lines(box / "changed") == []


def test_a_persons_own_service(box: Path):
    boot(
        box,
        _START
        + """
        systemctl start user@0 || exit 10
        export XDG_RUNTIME_DIR=/run/user/0
        install one --user > /box/said 2>&1 || { cat /box/said; exit 11; }
        served > /box/served
        tool service list --user > /box/list
        systemctl --user is-active $timer.timer > /box/timer
        systemctl --user start $timer.service
        journalctl --user-unit $timer -o cat > /box/checked
        ls ~/.config/dflash-sglang-health/box.json >/dev/null || exit 13
        # Dead behind its HTTP server.
        units=~/.config/systemd/user.control
        echo DFLASH_SIM_FAULT=dead-scheduler > /box/env-30000
        unready $units --user; systemctl --user restart $unit || exit 15
        until_ 30 served || exit 18
        dead=$(systemctl --user show -p MainPID --value $unit)
        rm /box/env-30000; rm -r $units/$unit.service.d; systemctl --user daemon-reload
        hasten $units --user
        until_ 60 sh -c "journalctl --user-unit $timer -o cat | grep -q 'restarting $unit'" || exit 16
        until_ 60 sh -c "systemctl --user show -p MainPID --value $unit | grep -vx $dead" || exit 17
        until_ 60 served; served >> /box/served
        rm -r $units
        tool service uninstall --user box || exit 12
        find ~/.config ~/.local/share -name '*dflash*' -type f | grep . && exit 14
        exit 0
        """,
    )
    assert _lines(box / "served") == ["one", "one"]
    assert "box: generation 1 of 1, active" in (box / "list").read_text()
    assert _lines(box / "timer") == ["active"]
    assert "DFLASH OK" in (box / "checked").read_text()

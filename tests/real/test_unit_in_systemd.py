"""Units rendered by us, run by systemd itself, booted in a box (``systemd_box.sh``)."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dflash_deploy.deploy import escape
from dflash_deploy.deploy.unit import UnitSpec, render_unit

from .box import boot, why_no_box, why_no_tool

_PYTHON = "/usr/bin/python3"


pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(why_no_box() is not None, reason=str(why_no_box())),
    pytest.mark.timeout(300),
]


@pytest.fixture
def box(tmp_path: Path) -> Path:
    folder = tmp_path / "box"
    folder.mkdir()
    # Services in the box run as users of their own.
    folder.chmod(0o755)
    return folder


# Letters that mean something somewhere between a unit's line and execve, and a few that only might.
_LETTERS = " %$\\\"';#{}()[]&|<>*?=~-@:+!nstux0éß漢🙂\u00a0\u2028\ufeff"
_HOSTILE = st.text(alphabet=_LETTERS, max_size=12)
_ANY = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]),
    max_size=12,
).filter(lambda text: escape._NONCHARACTER.search(text) is None)
_WORD = st.one_of(_HOSTILE, _ANY)
_NAME = st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True).map("T_{}".format)

# What the kernel was given, as it tells it itself.
_DUMP = """#!/bin/sh
cat /proc/$$/cmdline > /box/seen/{unit}-$$.argv
cat /proc/$$/environ > /box/seen/{unit}-$$.env
"""
_UNITS = 8
_COMMANDS = 32


@settings(
    max_examples=4,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(
    words=st.lists(_WORD, min_size=100, max_size=100),
    env=st.dictionaries(_NAME, _WORD, min_size=10, max_size=10),
    mixed=st.randoms(use_true_random=False),
)
def test_arguments_and_variables_arrive_byte_for_byte(tmp_path_factory, words, env, mixed):
    """1,024 commands in four boots, of 400 generated words."""
    folder = tmp_path_factory.mktemp("box")
    (folder / "seen").mkdir()
    mixing = random.Random(mixed.getrandbits(32))  # noqa: S311 - no secret
    commands = [
        [mixing.choices(words, k=mixing.randrange(7)) for _ in range(_COMMANDS)] for _ in range(_UNITS)
    ]
    commands[0].append(["", ";", "\\", "%n", "%%", "$HOME", "${HOME}", "$$", "$", '"', "'", "\\n"])
    commands[0].append(["a\\", "#", " "])
    assignments = [f"Environment={escape.environment_assignment(*item)}" for item in env.items()]
    for unit, its_commands in enumerate(commands):
        program = folder / f"pro gram 100%é;{unit}"
        program.write_text(_DUMP.format(unit=unit))
        program.chmod(0o755)
        lines = [f"ExecStart={escape.command_line(f'/box/{program.name}', one)}" for one in its_commands]
        text = "\n".join(["[Service]", "Type=oneshot", *assignments, *lines, ""])
        (folder / f"echo-{unit}.service").write_text(text)
    boot(
        folder,
        "cp /box/echo-*.service /run/systemd/system/; systemctl daemon-reload; "
        f"systemctl start echo-{{0..{_UNITS - 1}}}",
    )

    for unit, its_commands in enumerate(commands):
        seen = sorted((folder / "seen").glob(f"{unit}-*.argv"), key=lambda path: int(path.stem[2:]))
        # The first two words are the shell and the script.
        assert [path.read_bytes().split(b"\0")[2:-1] for path in seen] == [
            [word.encode() for word in one] for one in its_commands
        ]
        for path in seen:
            got = dict(
                line.split(b"=", 1) for line in path.with_suffix(".env").read_bytes().split(b"\0")[:-1]
            )
            assert {name: value for name, value in got.items() if name.startswith(b"T_")} == {
                name.encode(): value.encode() for name, value in env.items()
            }


# Stands for the engine: a main process with a child, which answers /health a while after it listens.
_ENGINE = r"""
import http.server, json, os, signal, subprocess, sys, threading, time
argv = sys.argv[1:]
if "--die" in argv:
    sys.exit("no memory left for the pool")
child = subprocess.Popen([sys.executable, "-c", '''
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: open(os.environ["HOME"] + "/child-got-sigterm", "w"))
while True: time.sleep(1)
'''])
config = open(argv[argv.index("--config") + 1]).read() if "--config" in argv else None
with open(os.environ["HOME"] + "/seen", "w") as file:
    json.dump({"uid": os.getuid(), "config": config, "argv": argv, "env": dict(os.environ),
               "umask": os.umask(0)}, file)
ready = time.monotonic() + 2

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if time.monotonic() > ready else 503)
        self.end_headers()

server = http.server.HTTPServer(("127.0.0.1", int(argv[argv.index("--port") + 1])), Handler)

def drain(*_):
    print("draining", flush=True)
    os._exit(0)

signal.signal(signal.SIGTERM, drain)
server.serve_forever()
"""

_STARTED = """
unit=dflash-sglang-box
cp /box/*.service /run/systemd/system/; systemctl daemon-reload
home=/var/cache/$unit
health() { python3 -c '
import urllib.request
print(urllib.request.urlopen("http://127.0.0.1:30000/health").status)
'; }
"""


_SPEC = UnitSpec(
    service="box",
    argv=(_PYTHON, "/box/engine.py", "--port", "30000", "--odd", "a b%c$HOME"),
    host="127.0.0.1",
    port=30000,
    env={"T_ODD": "a b%c$HOME"},
)


@pytest.mark.parametrize("user", [None, "daemon"])
def test_a_start_returns_when_the_model_answers_and_a_stop_signals_the_main_process_alone(box, user):
    (box / "engine.py").write_text(_ENGINE)
    (box / "key.yaml").write_text("api-key: sesame\n")
    (box / "key.yaml").chmod(0o600)
    (box / "dflash-sglang-box.service").write_text(
        render_unit(replace(_SPEC, api_key_file="/box/key.yaml", user=user))
    )
    boot(
        box,
        _STARTED
        + """
        systemctl start $unit || { journalctl -u $unit; exit 1; }
        health > /box/health
        cat /proc/*/cmdline | tr '\\0' ' ' > /box/cmdlines
        systemctl show $unit > /box/shown
        cp $home/seen /box/seen
        systemctl stop $unit || exit 1
        ls $home > /box/left
        systemctl show -p ActiveState,Result,ExecMainStatus $unit > /box/stopped
        journalctl -u $unit > /box/journal
        """,
    )
    assert (box / "health").read_text() == "200\n"
    seen = json.loads((box / "seen").read_text())
    assert seen["uid"] != 0
    assert seen["umask"] == 0o077
    assert seen["config"] == "api-key: sesame\n"
    assert seen["argv"][:4] == ["--port", "30000", "--odd", "a b%c$HOME"]
    assert seen["env"]["T_ODD"] == "a b%c$HOME"
    assert seen["env"]["HF_HOME"] == "/var/cache/dflash-sglang-box/huggingface"
    for public in ("cmdlines", "shown", "journal"):
        assert "sesame" not in (box / public).read_text()
    assert "child-got-sigterm" not in (box / "left").read_text()
    assert "draining" in (box / "journal").read_text()
    stopped = (box / "stopped").read_text().splitlines()
    assert stopped == ["Result=success", "ExecMainStatus=0", "ActiveState=inactive"]


def test_a_start_fails_with_a_reason_when_the_port_is_taken_or_the_engine_dies(box):
    (box / "engine.py").write_text(_ENGINE)
    (box / "dflash-sglang-box.service").write_text(render_unit(_SPEC))
    dies = replace(_SPEC, argv=(*_SPEC.argv, "--die"))
    (box / "dflash-sglang-dies.service").write_text(render_unit(dies))
    boot(
        box,
        _STARTED
        + """
        python3 -m http.server --bind 127.0.0.1 30000 & other=$!
        for _ in {1..300}; do : 2>/dev/null </dev/tcp/127.0.0.1/30000 && break; sleep 0.2; done
        systemctl start $unit && exit 1
        journalctl -u $unit -o cat > /box/taken
        kill $other; wait $other
        systemctl stop $unit
        systemctl start dflash-sglang-dies && exit 2
        journalctl -u dflash-sglang-dies -o cat > /box/died
        systemctl show -p Restart,SubState dflash-sglang-dies > /box/after
        systemctl stop dflash-sglang-dies
        exit 0
        """,
    )
    assert "127.0.0.1 port 30000 cannot be listened on: Address already in use" in (box / "taken").read_text()
    assert "no memory left for the pool" in (box / "died").read_text()
    assert "the engine ended before it answered" in (box / "died").read_text()
    assert "SubState=auto-restart" in (box / "after").read_text()


def test_a_persons_own_manager_runs_it_too(box):
    (box / "engine.py").write_text(_ENGINE)
    (box / "key.yaml").write_text("api-key: sesame\n")
    unit = render_unit(replace(_SPEC, manager="user", api_key_file="/box/key.yaml"))
    (box / "dflash-sglang-box.service").write_text(unit)
    boot(
        box,
        """
        unit=dflash-sglang-box
        systemctl start user@0 || exit 1
        export XDG_RUNTIME_DIR=/run/user/0
        mkdir -p $XDG_RUNTIME_DIR/systemd/user
        cp /box/$unit.service $XDG_RUNTIME_DIR/systemd/user/
        systemctl --user daemon-reload
        systemctl --user start $unit || { systemctl --user status $unit; journalctl -n 50; exit 1; }
        cp ~/seen /box/seen
        systemctl --user stop $unit
        ls -d $XDG_RUNTIME_DIR/$unit && exit 2
        exit 0
        """,
    )
    seen = json.loads((box / "seen").read_text())
    assert seen["config"] == "api-key: sesame\n"
    assert seen["argv"][:4] == ["--port", "30000", "--odd", "a b%c$HOME"]
    assert seen["env"]["TMPDIR"] == "/run/user/0/dflash-sglang-box"


@pytest.mark.skipif(why_no_tool() is not None, reason=str(why_no_tool()))
def test_status_finds_running_and_failed_units(box):
    (box / "engine.py").write_text(_ENGINE)
    (box / "dflash-sglang-box.service").write_text(render_unit(_SPEC))
    dies = replace(_SPEC, service="dies", port=30001, argv=(*_SPEC.argv, "--die"))
    (box / "dflash-sglang-dies.service").write_text(
        render_unit(dies).replace("StartLimitBurst=6", "StartLimitBurst=1")
    )
    root = Path(__file__).parents[2]
    boot(
        box,
        _STARTED
        + f"""
        systemctl start $unit || exit 1
        systemctl start dflash-sglang-dies; systemctl start dflash-sglang-dies
        cd {root}
        {sys.executable} -m dflash_deploy status --json > /box/status || exit 1
        {sys.executable} -m dflash_deploy status dies > /box/dies
        [ $? = 1 ] || exit 2
        systemctl stop $unit
        """,
    )
    servers = {server["name"]: server for server in json.loads((box / "status").read_text())["servers"]}
    assert set(servers) == {"box", "dies"}
    assert servers["box"]["health"] == "healthy"
    assert servers["box"]["url"] == "http://127.0.0.1:30000"
    assert servers["box"]["unit"]["active"] == "active"
    assert servers["dies"]["health"] == "unhealthy"
    assert "dflash-deploy diagnose --unit dflash-sglang-dies.service" in " ".join(
        (box / "dies").read_text().split()
    )

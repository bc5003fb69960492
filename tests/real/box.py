"""A machine that boots a real systemd for a test, and the tool and its simulated engine in it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

_BOX = Path(__file__).with_name("systemd_box.sh")
_ROOT = Path(__file__).parents[2]
# Everything of the tool's must be there to be seen from inside.
_PLACES = (sys.prefix, sys.base_prefix, str(_ROOT))
_HIDDEN = ("/tmp", "/var/tmp", "/run", "/dev")  # noqa: S108 - named, not written to


def why_no_box() -> str | None:
    """Why no systemd can be booted here."""
    if os.geteuid() != 0:
        return "booting a systemd box needs root"
    if not shutil.which("systemd-nspawn"):
        return "systemd-nspawn is missing (apt-get install systemd-container)"
    if not Path("/usr/bin/python3").exists():
        return "/usr/bin/python3 is missing"
    return None


def why_no_tool() -> str | None:
    """Why the tool cannot be run in the box."""
    for place in _PLACES:
        # The box has a /tmp of its own, and its services have /tmp and /var/tmp of theirs.
        if any(Path(place).resolve().is_relative_to(hidden) for hidden in _HIDDEN):
            return f"{place} is hidden from services in the box: check the project out elsewhere"
    if len({Path(place).stat().st_dev for place in ("/", *_PLACES)}) > 1:
        return "the tool is not on the root file system, which is all that the box has"
    return why_no_box()


def boot(folder: Path, script: str, *, within_s: float = 120) -> str:
    """Run a script inside the box; its status must be 0."""
    (folder / "run").write_text("set -u\n" + script)
    with subprocess.Popen(["bash", _BOX, folder]) as process:
        try:
            status = process.wait(timeout=within_s)
        finally:
            process.terminate()
    output = (folder / "output").read_text(errors="replace") if (folder / "output").exists() else ""
    assert status == 0, f"status {status}\n{output}\n{(folder / 'console').read_text(errors='replace')}"
    return output


def make_environment(folder: Path) -> None:
    """An environment whose SGLang is the simulator: ``env`` in the box's folder."""
    site = folder / "env" / "lib" / "python3.11" / "site-packages"
    for made in (folder / "env" / "bin", site / "sglang", site / "sglang-0.5.23.dist-info"):
        made.mkdir(parents=True)
    (site / "sglang" / "__init__.py").write_text("")
    # Looks for variables of this start (a fault, a speed) in a file named after its port.
    (site / "sglang" / "launch_server.py").write_text(
        "import os, sys\n"
        "try:\n"
        "    port = sys.argv[sys.argv.index('--port') + 1]\n"
        "    lines = open(f'/box/env-{port}').read().split()\n"
        "    os.environ.update(line.split('=', 1) for line in lines)\n"
        "except (OSError, ValueError):\n"
        "    pass\n"
        # A model in a folder is read as an engine would, and taken for one that the simulator knows.
        "place = sys.argv.index('--model-path') + 1\n"
        "if os.path.isdir(sys.argv[place]):\n"
        "    names = [os.path.join(sys.argv[place], name) for name in os.listdir(sys.argv[place])]\n"
        "    size = sum(len(open(name, 'rb').read()) for name in names)\n"
        "    print('read', size, 'bytes of', len(names), 'files in', sys.argv[place], 'as', os.getuid())\n"
        "    sys.argv[place] = 'qwen3.8-27b-nvfp4'\n"
        "from dflash_deploy.simulator.__main__ import main\n"
        "sys.exit(main())\n"
    )
    (site / "sglang-0.5.23.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 0.5.23\n")
    python = folder / "env" / "bin" / "python"
    # What stands around the engine runs under a Python that starts more quickly.
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *"-m sglang.launch_server"*)\n'
        f"  export PYTHONPATH={site.as_posix().replace(str(folder), '/box')}:{_ROOT}\n"
        f'  exec {sys.executable} "$@";;\nesac\nexec /usr/bin/python3 "$@"\n'
    )
    python.chmod(0o755)
    # Services in the box run as users of their own.
    folder.chmod(0o755)


# The box's root is a copy of the machine's that is thrown away: there, everyone may reach the tool.
_OWN = (Path(sys.executable), Path(sys.executable).resolve(), _ROOT / "x")
_REACHED = sorted({str(parent) for place in _OWN for parent in place.parents})

WITH_TOOL = f"""
cd {_ROOT}
chmod o+rx {shlex.join(_REACHED)}
export TERM=dumb
tool() {{ {sys.executable} -m dflash_deploy "$@"; }}
unit=dflash-sglang-box
timer=dflash-sglang-health@box
main_pid() {{ systemctl show -p MainPID --value ${{1:-$unit}}; }}
# until SECONDS COMMAND...: again and again, until it succeeds.
until_() {{
  local end=$((SECONDS + $1)); shift
  until "$@" >/dev/null 2>&1; do [ $SECONDS -lt $end ] || return 1; sleep 0.2; done
}}
served() {{ /usr/bin/python3 -c '
import json, sys, urllib.request
url = "http://127.0.0.1:%s/v1/models" % (sys.argv[1:] or ["30000"])[0]
print(json.load(urllib.request.urlopen(url))["data"][0]["id"])
' "$@"; }}
# Restarts at once, and checks again and again, instead of after many seconds.
hasten() {{
  local units=${{1:-/run/systemd/system}} scope=${{2:---system}}
  mkdir -p $units/dflash-sglang-.service.d $units/dflash-sglang-health@.{{timer,service}}.d
  printf '[Service]\\nRestartSec=300ms\\n' > $units/dflash-sglang-.service.d/fast.conf
  printf '[Timer]\\nOnActiveSec=\\nOnUnitInactiveSec=\\nOnActiveSec=300ms\\nOnUnitInactiveSec=300ms\\n' \\
    > $units/dflash-sglang-health@.timer.d/fast.conf
  cat > $units/dflash-sglang-health@.service.d/fast.conf <<END
[Service]
ExecStart=
ExecStart={sys.executable} -P -m dflash_deploy health %i --act --timeout 3 --checks 2 --cool-down 600
END
  systemctl $scope daemon-reload; systemctl $scope restart $timer.timer
}}
# The next start goes on though nothing is generated, as when the scheduler dies later.
unready() {{
  local units=${{1:-/run/systemd/system}} scope=${{2:---system}}
  mkdir -p $units/$unit.service.d
  printf '[Service]\\nExecStartPost=\\n' > $units/$unit.service.d/unready.conf
  systemctl $scope daemon-reload
}}
said() {{ journalctl -u $timer -o cat; }}
"""

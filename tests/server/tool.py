"""A tool that owns a server, to be killed or interrupted: ``tool.py RUN_DIR PORT NOTES [TROUBLE]``.

Prints the server's pid once it serves, then waits.
"""

import resource
import signal
import sys
import time
from pathlib import Path

from dflash_deploy.engine.launch import Launch
from dflash_deploy.errors import DeployError
from dflash_deploy.server.outcome import Served
from dflash_deploy.server.process import Server


def say(text: object) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    run_dir, port, notes, *trouble = sys.argv[1:]
    fake = Path(__file__).with_name("fake_server.py")
    argv = [sys.executable, "-S", str(fake), "--port", port, "--notes", notes]
    if trouble:
        argv += ["--trouble", trouble[0]]
    if "print-for-ever" in trouble:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.default_int_handler)
    launch = Launch(argv=tuple(argv), host="127.0.0.1", port=int(port), simulated=True)
    with Server(launch, Path(run_dir)) as server:
        outcome = server.start()
        assert isinstance(outcome, Served), outcome
        say(server.pid)
        while server.alive:
            time.sleep(0.05)
        say("dead")


if __name__ == "__main__":
    try:
        main()
    except DeployError as error:
        say(error.message)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)

"""A PostgreSQL of a test's own: on a free port of this machine, with a password, gone afterwards."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dflash_deploy.server.ports import free_port

HOST = "127.0.0.1"
PASSWORD = "known to the password file alone"
_USER = "tuner"


def find_postgres() -> Path | None:
    """The folder of its programs, None where there is none."""
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: path.parts[4])
    found = str(installed[-1]) if installed else shutil.which("initdb")
    return Path(found).parent if found else None


@dataclass(frozen=True)
class Database:
    """Where it is reached, without a password, and the variables that a client needs for it."""

    url: str
    env: dict[str, str]


@contextmanager
def postgres(programs: Path) -> Iterator[Database]:
    """Make one and run it; it refuses to be root, and so is nobody then."""
    folder = Path(tempfile.mkdtemp(prefix="dflash-postgres-"))
    nobody = pwd.getpwnam("nobody")
    as_root = os.geteuid() == 0
    who = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []} if as_root else {}
    (folder / "password").write_text(PASSWORD)
    (folder / "pgpass").write_text(f"*:*:*:*:{PASSWORD}\n")
    (folder / "pgpass").chmod(0o600)
    (folder / "data").mkdir(mode=0o700)
    if as_root:
        folder.chmod(0o711)
        os.chown(folder / "data", nobody.pw_uid, nobody.pw_gid)
    port = free_port(HOST)
    try:
        subprocess.run(
            [
                *(programs / "initdb", "-D", folder / "data", "-U", _USER, "-A", "scram-sha-256"),
                *(f"--pwfile={folder / 'password'}", "-N", "--locale=C"),
            ],
            check=True,
            capture_output=True,
            cwd=folder / "data",
            **who,
        )
        settings = {"listen_addresses": HOST, "port": port, "unix_socket_directories": "", "fsync": "off"}
        server = subprocess.Popen(
            [
                *(programs / "postgres", "-D", folder / "data"),
                *(word for name, value in settings.items() for word in ("-c", f"{name}={value}")),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder / "data",
            **who,
        )
        try:
            _wait_until_ready(programs, port)
            yield Database(
                f"postgresql://{_USER}@{HOST}:{port}/postgres", {"PGPASSFILE": str(folder / "pgpass")}
            )
        finally:
            server.send_signal(signal.SIGINT)  # at once: SIGTERM waits until every client has left
            server.wait(timeout=60)
    finally:
        shutil.rmtree(folder)


def _wait_until_ready(programs: Path, port: int) -> None:
    deadline = time.monotonic() + 60
    while subprocess.run(
        [programs / "pg_isready", "-q", "-h", HOST, "-p", str(port)], check=False
    ).returncode:
        assert time.monotonic() < deadline, "PostgreSQL does not answer"
        time.sleep(0.1)

"""Whether the account that runs a service may read what the service needs."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_deploy.errors import DeployError, ExitCode

_NOBODY = 65534
_ASK_S = 60.0
_MOST_FILES = 500
_HIDDEN = (Path("/tmp"), Path("/var/tmp"))  # noqa: S108 - named, not written to
# Prints each folder on the way that may not be entered; behind "--", each path that may not be read.
_LOOK = """
while [ "$1" != -- ]; do [ -x "$1" ] || echo "$1"; shift; done
shift
for path; do
  [ -r "$path" ] || echo "$path"
  [ ! -d "$path" ] || [ -x "$path" ] || echo "$path"
done
"""


@dataclass(frozen=True)
class Account:
    """Who runs a service; ``name`` is None for a user that systemd makes, who is like any stranger."""

    name: str | None
    uid: int
    gid: int
    groups: tuple[int, ...]


def account(name: str | None) -> Account:
    """The account of that name.

    Raises:
        DeployError: there is none.
    """
    if name is None:
        return Account(None, _NOBODY, _NOBODY, ())
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise DeployError(
            f"there is no account {name} here",
            fix=f"sudo useradd --system --create-home {name}, or leave out --run-as",
            exit_code=ExitCode.MISSING,
        ) from None
    return Account(name, entry.pw_uid, entry.pw_gid, tuple(os.getgrouplist(name, entry.pw_gid)))


def require(who: Account, what: str, folder: Path, *, files: Sequence[Path] = ()) -> None:
    """See that an account may read a folder and files in it; only root can try.

    Raises:
        DeployError: it may not, with the commands that let it.
    """
    wanted = [folder, *files][:_MOST_FILES]
    if inside := next((path for path in wanted if hidden(path)), None):
        raise DeployError(
            f"{what} is in {inside}, and a service has a /tmp and /var/tmp of its own",
            fix=f"move it elsewhere, such as below /opt: mv {shlex.quote(str(inside))} /opt/",
            exit_code=ExitCode.UNAVAILABLE,
        )
    if os.geteuid() != 0 or not folder.exists():
        return
    # A link leads to what must be readable too.
    ways = {parent for path in wanted for one in (path, path.resolve()) for parent in one.parents}
    closed = _closed(who, sorted(ways), wanted)
    if not closed:
        return
    # Only the way in: what lies behind a closed folder cannot be read either, whatever its own bits are.
    blocked = [path for path in closed if path in ways and not _under(path, folder)]
    # What is changed in all of a folder does not follow the links in it.
    elsewhere = {path.resolve() for path in closed if path not in ways}
    trees = [folder.resolve(), *sorted(one for one in elsewhere if not _under(one, folder.resolve()))]
    whom = who.name or "the user that systemd makes for the service"
    raise DeployError(
        f"{whom} may not read {what}: {closed[0]}",
        fix=_fix(who, blocked, trees),
        exit_code=ExitCode.UNAVAILABLE,
    )


def hidden(path: Path) -> bool:
    """A service does not see what lies there: it has a folder of its own in that place."""
    return any(place.is_relative_to(one) for place in (path, path.resolve()) for one in _HIDDEN)


def _under(path: Path, folder: Path) -> bool:
    return path == folder or path.is_relative_to(folder)


def _fix(who: Account, blocked: Sequence[Path], trees: Sequence[Path]) -> str:
    if who.name is not None and shutil.which("setfacl"):
        enter, read = f"setfacl -m u:{who.name}:x", f"setfacl -R -m u:{who.name}:rX"
    else:
        enter, read = "chmod o+x", "chmod -R o+rX"
        # Behind a closed folder everything is closed, also what would be open to all by its own bits.
        blocked = [path for path in blocked if not path.stat().st_mode & 0o001]
    first = f"{enter} {shlex.join(map(str, blocked))} && " if blocked else ""
    person = os.environ.get("SUDO_USER") or "an account that may read it"
    mine = "" if who.name else f"; or install it with --run-as {person}"
    return f"{first}{read} {shlex.join(map(str, trees))}{mine}"


def _closed(who: Account, ways: Sequence[Path], wanted: Sequence[Path]) -> list[Path]:
    """Asked of the kernel, as that account: permission bits, access lists and mounts all count."""
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", _LOOK, "sh", *map(str, ways), "--", *map(str, wanted)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",
            user=who.uid,
            group=who.gid,
            extra_groups=who.groups,
            timeout=_ASK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DeployError(
            f"{wanted[0]} does not answer (a network drive?)", exit_code=ExitCode.UNAVAILABLE
        ) from None
    return [Path(os.fsdecode(line)) for line in done.stdout.splitlines()]

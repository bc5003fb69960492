"""The generations of a service on disk: each written once, one of them the current one.

```
<root>/<service>/generations/0003/generation.json      what it is: command, environment, versions (0444)
                                 /<unit>.service       the unit, as systemd gets it
                                 /evidence.json        the trial that it was chosen for, where there is one
                /current -> generations/0003
                /history.jsonl                         what was done when, and what came of it
                /change.json                           stands only while a change goes on: what to mend
```
Nothing here talks to systemd; ``service`` does.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from dflash_deploy import paths
from dflash_deploy.deploy.unit import UNIT_PREFIX
from dflash_deploy.deploy.versions import Versions
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import read_regular, write_atomic
from dflash_deploy.lock import exclusive
from dflash_deploy.profile.schema import FlagSetting, Notify
from dflash_deploy.server.processes import Identity, alive

SYSTEM_ROOT = Path("/var/lib/dflash-deploy/services")
_LARGEST_BYTES = 8 << 20

Manager = Literal["system", "user"]
Operation = Literal["install", "rollback", "uninstall"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Generation(_Record):
    """One way to run a service.

    Attributes:
        number: counted from 1, never used twice.
        source: where the configuration comes from, in words.
        simulated: its figures were simulated.
        flags: the engine's, as records write them.
        argv: the engine's whole command.
        health_host: address that the engine is reached at from this machine.
        vram_expected_mib: what the card held at most when the configuration was measured.
        role: an engine, or a router in front of engines.
        notify: who is told when its state changes.
        unit_sha256: of the unit's text.
    """

    schema_version: Literal[1] = 1
    service: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
    number: Annotated[int, Field(ge=1)]
    created: AwareDatetime
    tool_version: str
    manager: Manager
    source: str
    simulated: bool
    flags: dict[str, FlagSetting]
    argv: tuple[str, ...]
    env: dict[str, str]
    host: str
    health_host: str
    port: int
    user: str | None = None
    api_key_file: str | None = None
    versions: Versions
    vram_expected_mib: int | None = None
    role: Literal["engine", "router"] = "engine"
    notify: Notify | None = None
    unit_sha256: str

    @property
    def unit_name(self) -> str:
        """File name of its unit."""
        return f"{UNIT_PREFIX}{self.service}.service"


class Event(_Record):
    """A change that came to its end."""

    at: AwareDatetime
    operation: Operation
    generation: int | None
    before: int | None = None
    ok: bool
    why: str | None = None


class PendingChange(_Record):
    """A change that goes on, or was cut short.

    Attributes:
        before: the generation that was current, None for none.
        after: the one that is to be, None when the service is taken away.
        running: the service ran when the change began.
        process: that works on it.
    """

    operation: Operation
    before: int | None
    after: int | None
    running: bool
    process: Identity

    @property
    def words(self) -> str:
        """What is done, for people."""
        return self.operation if self.after is None else f"{self.operation} of generation {self.after}"


_R = TypeVar("_R", bound=_Record)


@dataclass(frozen=True)
class Store:
    """The folder of one service."""

    folder: Path
    service: str

    @property
    def unit_name(self) -> str:
        """File name of the service's unit."""
        return f"{UNIT_PREFIX}{self.service}.service"

    def command(self, verb: str, *more: str) -> str:
        """What a person types to have something done with this service."""
        mine = [] if self.folder.parent == SYSTEM_ROOT else ["--user"]
        return " ".join(["dflash-deploy service", verb, *mine, self.service, *more])

    def numbers(self) -> list[int]:
        """Its generations, oldest first."""
        found = self.folder.glob("generations/[0-9]*")
        return sorted(int(path.name) for path in found if path.name.isdigit() and path.is_dir())

    def current(self) -> int | None:
        """The number of the current generation."""
        try:
            name = (self.folder / "current").readlink().name
        except OSError:
            return None
        return int(name) if name.isdigit() else None

    def generation(self, number: int) -> Generation:
        """Read one.

        Raises:
            DeployError: there is none of this number, or it cannot be read.
        """
        path = self._place(number) / "generation.json"
        if not path.parent.is_dir():
            known = ", ".join(map(str, self.numbers())) or "none"
            raise DeployError(
                f"service {self.service} has no generation {number} (it has: {known})",
                fix=self.command("show"),
                exit_code=ExitCode.MISSING,
            )
        return self._read(path, Generation)

    def unit_text(self, number: int) -> str:
        """The unit of a generation.

        Raises:
            DeployError: it cannot be read.
        """
        path = self._place(number) / self.unit_name
        try:
            return read_regular(path, most_bytes=_LARGEST_BYTES).decode()
        except OSError as error:
            raise self._damaged(path, error.strerror or str(error)) from error
        except UnicodeDecodeError as error:
            raise self._damaged(path, "it is no text") from error

    def wrote(self, unit: str) -> bool:
        """The text is that of one of its generations."""
        digest = sha256(unit.encode(errors="surrogateescape")).hexdigest()
        for number in self.numbers():
            with suppress(DeployError):
                if self.generation(number).unit_sha256 == digest:
                    return True
            with suppress(DeployError):
                if self.unit_text(number) == unit:
                    return True
        return False

    def evidence(self, number: int) -> str | None:
        """The record of the trial that a generation was chosen for, as JSON."""
        path = self._place(number) / "evidence.json"
        try:
            return read_regular(path, most_bytes=_LARGEST_BYTES).decode()
        except (OSError, UnicodeDecodeError):
            return None

    def next_number(self) -> int:
        """The number of a generation to come: none is used again, not even one that was deleted."""
        used = [*self.numbers(), *(event.generation or 0 for event in self.history())]
        return max(used, default=0) + 1

    def add(self, generation: Generation, unit: str, evidence: str | None) -> None:
        """Write a generation in one step; it is not current by that.

        Raises:
            OSError: it cannot be written, or its number is taken.
        """
        place = self._place(generation.number)
        place.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=".new-", dir=place.parent))
        try:
            content = {
                "generation.json": generation.model_dump_json(indent=2) + "\n",
                self.unit_name: unit,
                **({"evidence.json": evidence} if evidence else {}),
            }
            for name, text in content.items():
                write_atomic(new / name, text, mode=0o444)
            # It holds no secret: everyone may look at it.
            new.chmod(0o755)
            new.rename(place)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        _sync(place.parent)

    def switch(self, number: int | None) -> None:
        """Make a generation the current one in one step, or none."""
        link = self.folder / "current"
        if number is None:
            link.unlink(missing_ok=True)
            return
        new = self.folder / ".current.new"
        new.unlink(missing_ok=True)
        if link.is_dir() and not link.is_symlink():
            # Not ours, and in the way of the link.
            link.rename(self.folder / "current.was-a-folder")
        new.symlink_to(Path("generations") / f"{number:04d}")
        new.rename(link)
        _sync(self.folder)

    def begin(self, change: PendingChange) -> None:
        """Say what is about to be done, before it is."""
        write_atomic(self.folder / "change.json", change.model_dump_json() + "\n")

    def pending(self) -> PendingChange | None:
        """A change that goes on or was cut short.

        Raises:
            DeployError: its record cannot be read.
        """
        path = self.folder / "change.json"
        return self._read(path, PendingChange) if path.exists() else None

    def set_pending_aside(self) -> Path:
        """Keep an unreadable record of a change under another name, where it is in nobody's way."""
        aside = self.folder / "change.json.unreadable"
        (self.folder / "change.json").rename(aside)
        return aside

    def under_way(self) -> PendingChange | None:
        """A change that a command works on right now; None also where one was cut short."""
        try:
            change = self.pending()
        except DeployError:
            return None
        return change if change is not None and alive(change.process) else None

    def end(self, event: Event) -> None:
        """The change has come to its end, one way or the other: also where no disk takes the record of it."""
        path = self.folder / "history.jsonl"
        try:
            with path.open("ab+") as file:
                # What a full disk cut short is no part of this line.
                file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
                cut = file.read(1) not in (b"", b"\n")
                file.write(b"\n" * cut + event.model_dump_json().encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            error.filename = str(path)
            raise
        finally:
            (self.folder / "change.json").unlink(missing_ok=True)

    def history(self) -> list[Event]:
        """What was done, oldest first; a line that a crash cut is left out."""
        try:
            text = read_regular(self.folder / "history.jsonl", most_bytes=_LARGEST_BYTES).decode(
                errors="replace"
            )
        except OSError:
            return []
        events = []
        for line in text.split("\n"):  # what was told may hold other ends of lines
            try:
                events.append(Event.model_validate_json(line))
            except ValidationError:
                continue
        return events

    def sweep(self) -> None:
        """Take away what a crash left half written."""
        for path in self.folder.glob("generations/.new-*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob(".*.*"):
            if path.is_file() or path.is_symlink():
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Take the whole folder away, what tells of a cut change last."""
        for path in sorted(self.folder.iterdir(), key=lambda path: path.name == "change.json"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        self.folder.rmdir()

    def _read(self, path: Path, kind: type[_R]) -> _R:
        try:
            return kind.model_validate_json(read_regular(path, most_bytes=_LARGEST_BYTES))
        except OSError as error:
            raise self._damaged(path, error.strerror or str(error)) from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            at = ".".join(map(str, first["loc"]))
            raise self._damaged(path, f"{at}: {first['msg']}".removeprefix(": ")) from None

    def _damaged(self, path: Path, why: str) -> DeployError:
        return DeployError(
            f"{path} is no record that this tool reads: {why}",
            fix=f"{self.command('show')} (its generations), then {self.command('rollback', 'N')}; or install "
            "it again",
            exit_code=ExitCode.INVALID_INPUT,
        )

    def _place(self, number: int) -> Path:
        return self.folder / "generations" / f"{number:04d}"


def root_of(manager: Manager) -> Path:
    """Where services of the machine's manager are kept, or of one's own."""
    return SYSTEM_ROOT if manager == "system" else paths.data_dir() / "services"


def stores(root: Path) -> list[Store]:
    """Every service that is kept there."""
    try:
        return [Store(path, path.name) for path in sorted(root.iterdir()) if path.is_dir()]
    except OSError:
        return []


@contextmanager
def locked(store: Store, *, make: bool) -> Iterator[None]:
    """Keep other commands off a service; the lock goes with the process, however it ends.

    Raises:
        DeployError: another command works on it, it is not there, or may not be written.
    """
    try:
        if make:
            store.folder.mkdir(parents=True, exist_ok=True)
        if store.folder.is_dir() and not os.access(store.folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        descriptor = os.open(store.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise no_service(store.service) from None
    except OSError as error:
        raise DeployError(
            f"{store.folder} cannot be written: {error.strerror}",
            fix="run the command with sudo, or give --user for a service of your own"
            if isinstance(error, PermissionError)
            else "make room there, and mend its file system",
            exit_code=ExitCode.UNAVAILABLE,
        ) from error
    busy = DeployError(
        f"another command works on service {store.service}",
        fix="wait until it has ended",
        exit_code=ExitCode.UNAVAILABLE,
    )
    with exclusive(descriptor, busy=busy):
        # Taken away between being opened and being locked.
        if not os.path.isdir(store.folder) or not os.path.samestat(  # noqa: PTH112
            os.fstat(descriptor), store.folder.stat()
        ):
            raise no_service(store.service)
        yield


def no_service(name: str) -> DeployError:
    """There is no service of this name."""
    return DeployError(
        f"no service {name!r} is installed",
        fix="dflash-deploy service list (add --user for your own), or dflash-deploy service install",
        exit_code=ExitCode.MISSING,
    )


def event(
    operation: Operation, generation: int | None, before: int | None, *, ok: bool, why: str | None = None
) -> Event:
    """An event of this moment."""
    return Event(
        at=datetime.now(UTC), operation=operation, generation=generation, before=before, ok=ok, why=why
    )


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def as_json(generation: Generation) -> dict[str, object]:
    """A generation as ``--json`` prints it."""
    content: dict[str, object] = json.loads(generation.model_dump_json())
    return content

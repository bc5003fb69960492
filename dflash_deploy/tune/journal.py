"""The progress of a running study on disk, so that another process can show it.

```
<study>/tuner.json      the process that works on it, while it does
       /progress.jsonl  one event a line, from the start of its present run
```
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from dflash_deploy.files import read_regular, write_atomic
from dflash_deploy.server.processes import Identity, alive, boot_id, identity_of, pid_namespace
from dflash_deploy.tune.outlook import Ending, Outlook
from dflash_deploy.tune.records import Candidate, TrialRecord
from dflash_deploy.tune.screen import Screen

_LARGEST_BYTES = 32 << 20


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Tuner(_Record):
    """The process that works on a study, for good: see ``server.processes.Identity``."""

    process: Identity
    boot_id: str
    pid_namespace: str
    started: datetime


class Noted(_Record):
    """Something about the study as a whole."""

    event: Literal["note"] = "note"
    text: str


class Begun(_Record):
    """A trial began."""

    event: Literal["begun"] = "begun"
    candidate: Candidate
    outlook: Outlook


class Staged(_Record):
    """Where the running trial stands."""

    event: Literal["stage"] = "stage"
    text: str


class Ended(_Record):
    """A trial has ended; its record is on disk."""

    event: Literal["ended"] = "ended"
    number: int


class Over(_Record):
    """The run came to its own end."""

    event: Literal["over"] = "over"
    ending: Ending


Event = Annotated[Noted | Begun | Staged | Ended | Over, Field(discriminator="event")]
_EVENTS: TypeAdapter[Event] = TypeAdapter(Event)


class Journal:
    """Writes down what it is told, and passes it on to a screen that shows it.

    For who has the study's lock: another's journal would be overwritten.
    """

    def __init__(self, folder: Path, shown: Screen) -> None:
        self._folder = folder
        self._shown = shown

    def note(self, text: str) -> None:
        """Write and show it."""
        self._write(Noted(text=text))
        self._shown.note(text)

    def begun(self, candidate: Candidate, outlook: Outlook) -> None:
        """Write and show it."""
        self._write(Begun(candidate=candidate, outlook=outlook))
        self._shown.begun(candidate, outlook)

    def stage(self, text: str) -> None:
        """Write and show it."""
        self._write(Staged(text=text))
        self._shown.stage(text)

    def ended(self, record: TrialRecord) -> None:
        """Write and show it."""
        self._write(Ended(number=record.number))
        self._shown.ended(record)

    def over(self, ending: Ending) -> None:
        """Write why the run went no further."""
        self._write(Over(ending=ending))

    def __enter__(self) -> Self:
        """Begin anew: what a former run wrote is of no interest any more."""
        identity = identity_of(os.getpid())
        write_atomic(self._events, "")
        if identity is not None:  # a sandbox may hide it
            tuner = Tuner(
                process=identity,
                boot_id=boot_id(),
                pid_namespace=pid_namespace(),
                started=datetime.now(UTC),
            )
            write_atomic(self._folder / "tuner.json", tuner.model_dump_json() + "\n")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nobody works on it any more."""
        (self._folder / "tuner.json").unlink(missing_ok=True)

    @property
    def _events(self) -> Path:
        return self._folder / "progress.jsonl"

    def _write(self, event: Event) -> None:
        with self._events.open("a", encoding="utf-8") as file:
            file.write(event.model_dump_json() + "\n")


def tuner_of(folder: Path) -> Tuner | None:
    """The process that works on the study in ``folder`` now; None where there is none."""
    try:
        tuner = Tuner.model_validate_json(read_regular(folder / "tuner.json", most_bytes=_LARGEST_BYTES))
    except (OSError, ValidationError):
        return None
    here = tuner.boot_id == boot_id() and tuner.pid_namespace == pid_namespace()
    return tuner if here and alive(tuner.process) else None


class Reader:
    """Reads a journal while it grows."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "progress.jsonl"
        self._read_bytes = 0

    def new(self) -> Iterator[Event]:
        """What was written since this was last asked; a line half written waits, an odd one is left out."""
        try:
            content = read_regular(self._path, most_bytes=_LARGEST_BYTES)
        except OSError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < self._read_bytes:  # another run has begun
            self._read_bytes = 0
        lines, self._read_bytes = whole[self._read_bytes :], len(whole)
        for line in lines.splitlines():
            try:
                yield _EVENTS.validate_json(line)
            except ValidationError:
                continue

"""The last day of a service, a sample a minute, in a small SQLite file that grows no further.

A minute's place in the file is its number modulo a day's, so a new day writes over the last one. Whoever
cannot write just then leaves it; a file that is damaged is begun anew.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path

_MINUTE_S = 60
_SLOTS = 1440
_BUSY_S = 0.2
_BARS = "▁▂▃▄▅▆▇█"
_GAP = "·"


@dataclass(frozen=True)
class Sample:
    """One moment; None for what was not known.

    Attributes:
        at_s: seconds since the epoch.
        vram_free_mib: of the card that has least.
        simulated: 1 where the server was the simulator.
    """

    at_s: float
    tokens_per_s: float | None = None
    kv_usage: float | None = None
    accept_length: float | None = None
    vram_free_mib: float | None = None
    running: float | None = None
    simulated: float = 0.0


_COLUMNS = [field.name for field in fields(Sample)]


@dataclass(frozen=True)
class Series:
    """One figure over time: means of equal spans, oldest first, None where nothing was sampled.

    Simulated where any sample of it was.
    """

    name: str
    simulated: bool
    span_s: int
    values: tuple[float | None, ...]


def keep(file: Path, sample: Sample, *, mode: int = 0o644) -> None:
    """Write a sample; a second one within a minute takes the place of the first. Never fails."""
    if not all(value is None or math.isfinite(value) for value in astuple(sample)):
        return
    for _ in range(2):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with _opened(f"file:{_quoted(file)}?mode=rwc") as database, database:
                columns = ", ".join(f"{name} REAL" for name in _COLUMNS)
                database.execute(f"CREATE TABLE IF NOT EXISTS sample (slot INTEGER PRIMARY KEY, {columns})")
                slot = int(sample.at_s // _MINUTE_S) % _SLOTS
                places = ", ".join("?" * (len(_COLUMNS) + 1))
                database.execute(
                    f"INSERT OR REPLACE INTO sample VALUES ({places})",  # noqa: S608 - question marks
                    (slot, *astuple(sample)),
                )
            # It holds no secret, and the unit that writes it has a strict umask.
            file.chmod(mode)
        except sqlite3.OperationalError as error:
            if "column" not in str(error):
                # Somebody else writes, or nobody can.
                return
            with suppress(OSError):
                file.unlink(missing_ok=True)
        except sqlite3.DatabaseError:
            with suppress(OSError):
                file.unlink(missing_ok=True)
        except OSError:
            return
        else:
            return


def read(file: Path, *, since_s: float) -> tuple[Sample, ...]:
    """Samples from then on, oldest first; none where the file is not there, damaged or may not be read."""
    if not file.is_file():
        return ()
    try:
        with _opened(f"file:{_quoted(file)}?mode=ro") as database:
            names = ", ".join(_COLUMNS)
            rows = database.execute(
                f"SELECT {names} FROM sample WHERE at_s >= ? ORDER BY at_s LIMIT ?",  # noqa: S608 - our names
                (since_s, _SLOTS),
            ).fetchall()
    except (sqlite3.Error, OSError):
        return ()
    return tuple(Sample(*row) for row in rows if _sound(row))


def series(samples: Sequence[Sample], *, now_s: float, hours: int, spans: int) -> tuple[Series, ...]:
    """The last hours of each figure that has any, in so many spans."""
    span_s = hours * 3600 // spans
    found = []
    for name in ("tokens_per_s", "kv_usage", "accept_length", "vram_free_mib"):
        values: list[list[float]] = [[] for _ in range(spans)]
        simulated = False
        for sample in samples:
            place = spans - 1 - int((now_s - sample.at_s) // span_s)
            value = getattr(sample, name)
            if value is not None and 0 <= place < spans:
                values[place].append(value)
                simulated = simulated or bool(sample.simulated)
        means = tuple(sum(one) / len(one) if one else None for one in values)
        if any(mean is not None for mean in means):
            found.append(Series(name, simulated, span_s, means))
    return tuple(found)


def sparkline(values: Iterable[float | None]) -> str:
    """One bar a value, from zero to the largest; a dot where there is none."""
    known = list(values)
    top = max((value for value in known if value is not None), default=0.0)
    return "".join(_GAP if value is None else _bar(value, top) for value in known)


def _bar(value: float, top: float) -> str:
    share = value / top if top > 0 else 0.0
    return _BARS[min(len(_BARS) - 1, max(0, int(share * len(_BARS))))]


def _sound(row: Sequence[object]) -> bool:
    """The file may be anybody's: every value is a number that is one, or nothing."""
    at_s, *rest = row
    return isinstance(at_s, float) and all(
        value is None or (isinstance(value, float) and math.isfinite(value)) for value in rest
    )


@contextmanager
def _opened(uri: str) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_S)) as database:
        yield database


def _quoted(file: Path) -> str:
    return "".join(f"%{ord(letter):02x}" if letter in "%?#" else letter for letter in str(file))

"""A configuration written as arguments for one SGLang, and arguments checked against it.

Standard library only: the simulator starts with this module.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Literal

from dflash_deploy.engine.sglang.options import (
    REQUIRED,
    Option,
    history,
    instead_words,
    nearest_name,
    new_name,
    renames,
    rows,
    value_fault,
)
from dflash_deploy.engine.sglang.versions import RELEASES, nearest, order
from dflash_deploy.errors import DeployError, ExitCode

if TYPE_CHECKING:
    import argparse

    from dflash_deploy.engine.launch import Flags, FlagValue

_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


@dataclass(frozen=True)
class FlagProblem:
    """One thing that is wrong, or not as it should be, with arguments given to SGLang.

    ``warning`` marks what works all the same.
    """

    flag: str
    kind: Literal[
        "unknown", "ambiguous", "abbreviated", "deprecated", "removed", "choice", "type", "repeated", "value"
    ]
    message: str
    instead: str | None = None

    @property
    def warning(self) -> bool:
        """SGLang starts with it all the same."""
        return self.kind in ("abbreviated", "deprecated", "repeated")


@dataclass(frozen=True)
class FlagTable:
    """The options of one SGLang.

    Attributes:
        version: the SGLang that is meant.
        options: its options.
        note: why another release's options stand in for it, or None.
    """

    version: str
    options: tuple[Option, ...]
    note: str | None = None

    @classmethod
    def for_version(cls, version: str) -> FlagTable:
        """The table of a release, or of the known one nearest to ``version`` (then with a note)."""
        known = nearest(version)
        return replace(_table_of(known.release), version=version, note=known.note)

    @cached_property
    def _by_name(self) -> Mapping[str, Option]:
        index: dict[str, Option] = {}
        for option in self.options:
            index.update(dict.fromkeys(option.names, option))
            if option.kind == "toggle":
                index.update({f"no-{name}": option for name in option.names})
        return index

    def find(self, name: str) -> Option | None:
        """The option of this exact name (any of its spellings, ``no-`` of a toggle too), or None."""
        return self._by_name.get(name)

    def names(self) -> tuple[str, ...]:
        """Every spelling that is written out in full."""
        return tuple(self._by_name)

    def spell(self, flags: Flags) -> tuple[str, ...]:
        """Write flags as arguments for this version: full names, values as its parser reads them.

        Args:
            flags: by the newest version's names; a name of this version's own past is understood too.

        Raises:
            DeployError: unknown flags or wrong values, all of them at once.
        """
        argv: list[str] = []
        faults: list[str] = []
        for name, value in flags.items():
            option = self._own_option(name)
            if option is None:
                faults.append(self._unknown(name).message)
                continue
            by_its_twin = option.kind == "toggle" and name == f"no-{option.name}"
            try:
                argv += _spelled(option, not value if by_its_twin and isinstance(value, bool) else value)
            except ValueError as error:
                faults.append(f"--{option.name}: {error}")
        if faults:
            raise DeployError(
                f"SGLang {self.version} would refuse:\n" + "\n".join(f"  {fault}" for fault in faults),
                fix="correct these flags in the profile (dflash-deploy profile validate)",
                exit_code=ExitCode.INVALID_INPUT,
            )
        return tuple(argv)

    def _own_option(self, name: str) -> Option | None:
        """This version's option for a name of the newest version, or of this one's own past."""
        option = self.find(name)
        if option is None:
            return self.find(renames().get(name, ""))
        return self.find(new_name(option) or "") or option

    def problems(self, argv: Sequence[str]) -> tuple[FlagProblem, ...]:
        """What this version's parser would refuse in these arguments, or warn of."""
        found: list[FlagProblem] = []
        seen: set[str] = set()
        words = list(argv)
        at = 0
        while at < len(words):
            word = words[at]
            at += 1
            if not _is_flag(word):
                found.append(FlagProblem(word, "value", f"{_shown(word)} follows no flag that takes it"))
                continue
            given, equals, attached = word.partition("=")
            option = self._read_name(given, found)
            values = [attached] if equals else []
            if option is None:
                # Whatever follows belongs to the flag that is not known, not to the next complaint.
                while at < len(words) and not _is_flag(words[at]):
                    at += 1
                continue
            if option.name in seen and option.takes_value:
                found.append(
                    FlagProblem(
                        given, "repeated", f"--{option.name} is given more than once; the last one counts"
                    )
                )
            seen.add(option.name)
            if not equals and option.takes_value:
                limit = None if option.nargs in ("+", "*") else 1
                while at < len(words) and not _is_flag(words[at]) and (limit is None or len(values) < limit):
                    values.append(words[at])
                    at += 1
            found += _value_problems(option, given, values)
        if REQUIRED not in seen and "config" not in seen:
            found.append(FlagProblem(f"--{REQUIRED}", "value", f"--{REQUIRED} is missing"))
        return tuple(found)

    def _read_name(self, given: str, found: list[FlagProblem]) -> Option | None:
        name = given.removeprefix("--")
        option = self.find(name) if given.startswith("--") else None
        if given in ("-h", "--help"):
            return _HELP
        if option is None:
            long = sorted(
                known for known in self.names() if given.startswith("--") and known.startswith(name)
            )
            if not long:
                found.append(self._unknown(name, given))
                return None
            if len(long) > 1:
                instead = next((row.option.instead for row in history(name) if row.option.instead), None)
                hint = f"--{instead}" if instead else f"one of {', '.join(f'--{one}' for one in long[:6])}"
                found.append(
                    FlagProblem(
                        given,
                        "ambiguous",
                        f"{_shown(given)} begins several flags of SGLang {self.version}: write {hint}",
                        instead,
                    )
                )
                return None
            option = self.find(long[0])
            found.append(
                FlagProblem(
                    given,
                    "abbreviated",
                    f"{_shown(given)} is read as --{long[0]}: write it in full",
                    long[0],
                )
            )
        if option is not None and option.is_old:
            if option.kind == "old-error":
                found.append(
                    FlagProblem(
                        given, "removed", f"{given} was removed{instead_words(option)}", option.instead
                    )
                )
            else:
                found.append(
                    FlagProblem(
                        given, "deprecated", f"{given} is an old name{instead_words(option)}", option.instead
                    )
                )
        return option

    def _unknown(self, name: str, given: str | None = None) -> FlagProblem:
        given = given or f"--{name}"
        past = list(history(name))
        if past:
            last = max((row.last for row in past), key=order)
            first = min((row.first for row in past), key=order)
            if order(last) < order(self.version) and last != RELEASES[-1]:
                gone = RELEASES[RELEASES.index(last) + 1]
                instead = past[-1].option.instead
                return FlagProblem(
                    given,
                    "removed",
                    f"{given} was removed in SGLang {gone}{instead_words(past[-1].option)}",
                    instead or None,
                )
            if order(first) > order(self.version):
                return FlagProblem(
                    given, "unknown", f"{given} came with SGLang {first}; {self.version} lacks it"
                )
        near = nearest_name(name, self.names())
        hint = f": did you mean --{near}?" if near else ""
        return FlagProblem(
            given, "unknown", f"{_shown(given)} is no flag of SGLang {self.version}{hint}", near
        )

    def parser(self, prog: str = "sglang serve") -> argparse.ArgumentParser:
        """A parser that reads arguments as this version's own does, and exits with 2 where that would."""
        from dflash_deploy.engine.sglang.arguments import server_parser  # noqa: PLC0415 -- argparse takes its time

        return server_parser(self.options, prog)


_HELP = Option(("help",), "switch")


@cache
def _table_of(release: str) -> FlagTable:
    at = RELEASES.index(release)
    options = tuple(
        row.option for row in rows() if RELEASES.index(row.first) <= at <= RELEASES.index(row.last)
    )
    return FlagTable(release, options)


def _shown(word: str) -> str:
    return word if len(word) <= 60 and word.isprintable() else f"{word[:60]!r}…"


def _is_flag(word: str) -> bool:
    """Argparse's own rule: a dash in front, not a negative number, and no space within."""
    if not word.startswith("-") or word == "-" or _NEGATIVE_NUMBER.fullmatch(word):
        return False
    return " " not in word.partition("=")[0]


def _value_problems(option: Option, given: str, values: list[str]) -> Iterator[FlagProblem]:
    if not option.takes_value:
        if values:
            yield FlagProblem(given, "type", f"--{option.name} takes no value")
        return
    if not values and option.nargs not in ("*", "?"):
        yield FlagProblem(given, "value", f"--{option.name} wants a value")
    for value in values:
        fault = value_fault(option, value)
        if fault is not None:
            yield FlagProblem(given, fault[0], f"--{option.name}: {fault[1]}")


def _spelled(option: Option, value: FlagValue) -> list[str]:
    """One option as arguments.

    Raises:
        ValueError: the value is not one that this option takes.
    """
    if not option.takes_value:
        if not isinstance(value, bool):
            raise ValueError(f"it is a switch: true or false, not {value!r}")
        if option.kind == "toggle":
            return [f"--{option.name}" if value else f"--no-{option.name}"]
        return [f"--{option.name}"] if value else []
    several = isinstance(value, tuple)
    parts = value if isinstance(value, tuple) else (value,)
    if several and option.nargs not in ("+", "*"):
        raise ValueError("it takes one value, not a list")
    if not parts and option.nargs == "+":
        raise ValueError("it takes one or more values, and the list is empty")
    texts = [_value_text(option, part) for part in parts]
    for text in texts:
        fault = value_fault(option, text)
        if fault is not None:
            raise ValueError(fault[1])
    if len(texts) == 1 and texts[0].startswith("-") and not _NEGATIVE_NUMBER.fullmatch(texts[0]):
        return [f"--{option.name}={texts[0]}"]
    if any(_is_flag(text) for text in texts):
        raise ValueError("a value in a list cannot begin with a dash")
    return [f"--{option.name}", *texts]


def _value_text(option: Option, value: bool | int | float | str) -> str:
    if isinstance(value, bool):
        raise ValueError(f"it takes a value, not {str(value).lower()}")  # noqa: TRY004 -- caught as one
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is no finite number")
        if value.is_integer() and option.type in ("int", "size"):
            return str(int(value))
        return repr(value)
    text = str(value)
    if "\0" in text or text == "--":
        raise ValueError(f"{text!r} cannot be given on a command line")
    return text

"""The options of SGLang's own parser, release by release (``flags.tsv``), and how their values are read."""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Literal, cast

from dflash_deploy.engine.sglang.versions import RELEASES

Kind = Literal[
    "value", "switch", "toggle", "lora", "old-value", "old-switch", "old-const", "old-nothing", "old-error"
]
"""How an option is read. ``toggle`` has a ``--no-`` twin; ``old-`` ones are names of the past."""

REQUIRED = "model-path"
"""The one option that SGLang does not start without."""

# Their old names took other values, so that neither stands for the other.
_NEW_MEANING = ("cp-strategy", "attn-dp-size", "enable-prefill-cp")


@dataclass(frozen=True)
class Option:
    """One option of one release.

    Attributes:
        names: full name first, then the other spellings; without dashes in front.
        type: name of the reader of its value (``READERS``); ``text`` is taken as it comes.
        nargs: as argparse's, empty for exactly one value; ``one`` marks a constant that wants a word.
        default: value where the option is left out.
        choices: allowed values as text, empty where any will do.
        dest: attribute that holds the value after parsing.
        instead: what to write instead of a name of the past: ``name`` or ``name=value``, several by space.
    """

    names: tuple[str, ...]
    kind: Kind
    type: str = "text"
    nargs: str = ""
    default: object = None
    choices: tuple[str, ...] = ()
    dest: str = ""
    instead: str = ""

    @property
    def name(self) -> str:
        """The full name."""
        return self.names[0]

    @property
    def is_old(self) -> bool:
        """It still works, but has another name now."""
        return self.kind.startswith("old-")

    @property
    def takes_value(self) -> bool:
        """It is followed by one or more values."""
        return self.kind in ("value", "lora", "old-value") or self.nargs == "one"


def human_readable_int(text: str) -> int:
    """Read ``8k`` (8000), ``8Ki`` (8192), ``25.6k``, ``1M`` … as SGLang does: case matters, no ``0.5Ki``."""
    text = text.strip()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kMGT]|[KMGT]i)", text)
    if match is None:
        try:
            return int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"invalid integer value: {text!r}; write a plain integer, 8k (8000) or 8Ki (8192)"
            ) from None
    number, suffix = match.groups()
    power = "KMGT".index(suffix[0].upper()) + 1
    if len(suffix) == 1:
        return int(Decimal(number) * 1000**power)
    if "." in number:
        raise argparse.ArgumentTypeError(f"decimals are not allowed with {suffix}: {text!r}")
    return int(int(number) * 1024**power)


def _json(text: str) -> object:
    return cast(object, json.loads(text))


def _json_list(text: str) -> object:
    try:
        return cast(object, json.loads(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid JSON list: {text}") from None


def _nullable(text: str) -> str | None:
    return None if text in ("", "None") else text


def _graph_backend(text: str) -> str:
    if text == "tc_piecewise":
        raise argparse.ArgumentTypeError("tc_piecewise was removed; select breakable, full, or disabled")
    return text


def _graph_config(text: str) -> object:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"--cuda-graph-config must be JSON: {error}") from None
    if not isinstance(config, dict):
        raise argparse.ArgumentTypeError("--cuda-graph-config must be a JSON object")
    for phase, settings in config.items():
        if phase not in ("decode", "prefill"):
            raise argparse.ArgumentTypeError(
                f"--cuda-graph-config: unknown phase {phase!r}, expected decode or prefill"
            )
        if not isinstance(settings, dict):
            raise argparse.ArgumentTypeError(f"--cuda-graph-config[{phase!r}] must be a JSON object")
    return config


READERS: Mapping[str, Callable[[str], object]] = {
    "text": str,
    "int": int,
    "float": float,
    "size": human_readable_int,
    "json": _json,
    "json-list": _json_list,
    "nullable": _nullable,
    "graph-backend": _graph_backend,
    "graph-config": _graph_config,
}
_TYPE_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "size": "a whole number, or one such as 8k (8000) or 8Ki (8192)",
    "json": "JSON",
    "json-list": "a JSON list",
    "graph-config": "a JSON object of decode and prefill settings",
}


def value_fault(option: Option, text: str) -> tuple[Literal["type", "choice"], str] | None:
    """What is wrong with one value, as kind and words; None where it is right."""
    try:
        value = READERS[option.type](text)
    except argparse.ArgumentTypeError as error:
        return "type", str(error)
    except (ValueError, ArithmeticError, RecursionError):
        return "type", f"{text!r} is not {_TYPE_WORDS.get(option.type, option.type)}"
    if option.choices and str(value) not in option.choices:
        return (
            "choice",
            f"{text!r} is not one of {', '.join(option.choices)}{_or_nearest(text, option.choices)}",
        )
    return None


def _or_nearest(word: str, known: Iterable[str]) -> str:
    near = nearest_name(word, known)
    return f" (did you mean {near}?)" if near else ""


def nearest_name(word: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one was probably meant to be."""
    from difflib import get_close_matches  # noqa: PLC0415 -- only ever needed once something is wrong

    matches = get_close_matches(word[:100], list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


@dataclass(frozen=True)
class Row:
    """One shape of an option, and the first and last release that have it."""

    first: str
    last: str
    option: Option


@cache
def rows() -> tuple[Row, ...]:
    """The whole table."""
    table = []
    for line in Path(__file__).with_name("flags.tsv").read_text().splitlines():
        if line.startswith("#"):
            continue
        cells = line.split("\t")
        cells += [""] * (10 - len(cells))
        first, last, names, kind, type_, nargs, default, choices, dest, instead = cells
        option = Option(
            names=tuple(names.split()),
            kind=cast(Kind, kind),
            type=type_ or "text",
            nargs=nargs,
            default=ast.literal_eval(default) if default else (False if kind.endswith("switch") else None),
            choices=tuple(choices.split()),
            dest=dest or names.split()[0].replace("-", "_"),
            instead=instead,
        )
        table.append(Row(first or RELEASES[0], last or RELEASES[-1], option))
    return tuple(table)


def history(name: str) -> Iterator[Row]:
    """Every shape that an option of this name has had."""
    return (row for row in rows() if name in row.option.names)


def new_name(option: Option) -> str | None:
    """The name that a name of the past has now, where the values mean the same."""
    if option.kind not in ("old-value", "old-switch") or "=" in option.instead:
        return None
    return option.instead if option.instead not in _NEW_MEANING else None


@cache
def renames() -> Mapping[str, str]:
    """New name → the old name that took the same values."""
    return {new: row.option.name for row in rows() if (new := new_name(row.option))}


def instead_words(option: Option) -> str:
    """``: write --new-name``, or nothing where there is none."""
    if not option.instead:
        return ""
    return ": write " + " ".join(f"--{one.replace('=', ' ')}" for one in option.instead.split())

"""Arguments read into flags of the newest names, and what cannot be read told."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_deploy.engine.launch import FlagValue
from dflash_deploy.engine.sglang.flags import FlagTable
from dflash_deploy.engine.sglang.options import READERS, Option, history, new_name, value_fault
from dflash_deploy.engine.sglang.pasted.words import Notes, Word, shown
from dflash_deploy.engine.sglang.versions import order
from dflash_deploy.errors import DeployError

_SECRETS = ("api-key", "admin-api-key")
REDACTED = "***"
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")
_NUMBERS = {"int", "float", "size"}


@dataclass(frozen=True)
class Given:
    """One flag as given: the option that it names, and its values as text."""

    word: str
    option: Option | None
    values: tuple[str, ...]
    attached: bool = False


def without_unknown(words: Sequence[Word], table: FlagTable, notes: Notes) -> tuple[str, ...]:
    """The arguments, less those whose value only the shell of their author knows. Secrets are blotted out."""
    argv: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not _is_flag(word.text):
            if word.unknown:
                notes.add(f"{_parts(word)} is not in what was pasted: planned without what it would add")
            else:
                argv.append(word.text)
            continue
        name, equals, _ = word.text.removeprefix("--").partition("=")
        option = find_option(name, table)
        values: list[Word] = []
        while at < len(words) and not equals and not _is_flag(words[at].text) and _takes(option, len(values)):
            values.append(words[at])
            at += 1
        unknown = [one for one in (word, *values) if one.unknown]
        if unknown and option is not None and (option.type != "text" or option.choices):
            said = ", ".join(_parts(one) for one in unknown)
            notes.add(
                f"--{option.name}: the value of {said} is not in what was pasted: planned as if left out"
            )
            continue
        if unknown:
            said = ", ".join(_parts(one) for one in unknown)
            notes.add(f"{shown(f'--{name}')}: the value of {said} is not in what was pasted")
        if option is not None and option.name in _SECRETS:
            argv += [f"--{name}={REDACTED}"] if equals else [word.text, *(REDACTED for _ in values)]
            continue
        argv += [word.text, *(one.text for one in values)]
    return tuple(argv)


def read_flags(argv: Sequence[str], table: FlagTable) -> dict[str, FlagValue]:
    """Flags by their newest names.

    What this release's parser refuses is left out, a name of another release is read as meant;
    ``FlagTable.problems`` tells of both.
    """
    flags: dict[str, FlagValue] = {}
    for given in given_flags(argv, table):
        option = given.option
        if option is None:
            continue
        if option.kind == "old-const":
            name, _, value = option.instead.partition("=")
            if value:
                flags[name] = value
            continue
        name = new_name(option) or option.name
        value_read = _value(given)
        if value_read is not None:
            flags[name] = value_read
    return with_graph_config(flags)


def given_flags(argv: Sequence[str], table: FlagTable) -> Iterator[Given]:
    """Each flag with the values that follow it."""
    at = 0
    while at < len(argv):
        word = argv[at]
        at += 1
        if not _is_flag(word):
            continue
        name, equals, attached = word.removeprefix("--").partition("=")
        option = find_option(name, table)
        values = [attached] if equals else []
        while at < len(argv) and not equals and not _is_flag(argv[at]) and _takes(option, len(values)):
            values.append(argv[at])
            at += 1
        yield Given(word.partition("=")[0], option, tuple(values), bool(equals))


def find_option(name: str, table: FlagTable) -> Option | None:
    """The option of a name or its beginning; one of another release where this one has none.

    Underscores are read as dashes: the engine refuses them, which ``FlagTable.problems`` tells.
    """
    name = name.replace("_", "-")
    option = table.find(name)
    if option is not None:
        return option
    past = sorted(history(name), key=lambda row: order(row.last))
    if past:
        return past[-1].option
    longer = {table.find(known) for known in table.names() if name and known.startswith(name)}
    return longer.pop() if len(longer) == 1 else None


def config_words(argv: Sequence[str], table: FlagTable, folder: Path | None, notes: Notes) -> tuple[str, ...]:
    """What the file of ``--config`` sets, as SGLang puts it before the arguments."""
    files = [
        given.values[0]
        for given in given_flags(argv, table)
        if given.option is not None and given.option.name == "config" and given.values
    ]
    if not files:
        return ()
    if len(files) > 1:
        notes.add("--config is given more than once: SGLang refuses that; the last file is planned")
    from dflash_deploy import yaml_file  # noqa: PLC0415 -- rarely needed, and slow to import

    path = Path(files[-1]).expanduser() if files[-1].startswith("~/") else Path(files[-1])
    path = path if path.is_absolute() or folder is None else folder / path
    if path.suffix not in (".yaml", ".yml"):
        notes.add(f"--config {shown(files[-1])}: SGLang takes only a .yaml or .yml file")
        return ()
    try:
        content = yaml_file.read(path).value
    except DeployError:
        notes.add(f"--config {shown(files[-1])} cannot be read here: planned without what it sets")
        return ()
    if not isinstance(content, dict):
        notes.add(f"--config {shown(files[-1])} holds no keys with values")
        return ()
    notes.add(f"--config {shown(files[-1])} is read: {len(content)} flags from it, the command's own win")
    return mapping_words(content, table, notes)


def mapping_words(content: Mapping[str, object], table: FlagTable, notes: Notes) -> tuple[str, ...]:
    """Arguments for a mapping of flags, as SGLang makes them of its ``--config`` file."""
    words: list[str] = []
    for key, value in content.items():
        option = table.find(key)
        if key == "disable-cuda-graph":
            notes.add("disable-cuda-graph cannot be set in a --config file: SGLang refuses to start")
        if option is not None and not option.takes_value and option.kind != "toggle":
            words += [f"--{key}"] if value is True or value == "true" else []
        elif option is not None and option.kind == "toggle":
            words.append(f"--{key}" if value is True or value == "true" else f"--no-{key}")
        elif isinstance(value, list):
            words += [f"--{key}", *(str(one) for one in value)]
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            words += [f"--{key}", REDACTED if key in _SECRETS else text]
    return tuple(words)


def _value(given: Given) -> FlagValue | None:
    option = given.option
    assert option is not None  # noqa: S101 -- asked before
    if not option.takes_value:
        if option.kind == "toggle":
            return given.word.removeprefix("--") in option.names
        return None if option.kind in ("old-nothing", "old-error") else True
    if not given.values or any(value_fault(option, value) is not None for value in given.values):
        return None
    values = [_typed(option, value) for value in given.values]
    if option.nargs in ("+", "*"):
        return tuple(values)  # type: ignore[return-value]  # one option's values are of one kind
    return values[-1]


def _typed(option: Option, text: str) -> int | float | str:
    if option.type in _NUMBERS:
        value = READERS[option.type](text)
        if isinstance(value, int | float):
            return value
    return text


def with_graph_config(flags: dict[str, FlagValue]) -> dict[str, FlagValue]:
    """``--cuda-graph-config``'s JSON as the flags that say the same; these win where both are given."""
    text = flags.get("cuda-graph-config")
    if not isinstance(text, str):
        return flags
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        return flags
    said: dict[str, FlagValue] = {}
    for phase, settings in config.items() if isinstance(config, dict) else ():
        if phase not in ("decode", "prefill") or not isinstance(settings, dict):
            continue
        for key, flag in (("backend", "backend"), ("max_bs", "max-bs"), ("bs", "bs")):
            value = settings.get(key)
            name = f"cuda-graph-{flag}-{phase}"
            if isinstance(value, bool):
                continue
            if key == "bs" and isinstance(value, list) and value and all(type(one) is int for one in value):
                said[name] = tuple(value)
            elif (key == "backend" and isinstance(value, str)) or (
                key == "max_bs" and isinstance(value, int)
            ):
                said[name] = value
    return {**said, **flags}


def _takes(option: Option | None, had: int) -> bool:
    """Another value may follow."""
    if option is None:
        return True
    if not option.takes_value:
        return False
    return option.nargs in ("+", "*") or had == 0


def _is_flag(word: str) -> bool:
    if not word.startswith("-") or word == "-" or _NEGATIVE.fullmatch(word):
        return False
    return " " not in word.partition("=")[0]


def _parts(word: Word) -> str:
    return ", ".join(shown(part, 40) for part in word.unknown)

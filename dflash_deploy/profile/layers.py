"""One document laid over another.

Keys with values are merged key by key; anything else is replaced; ``null`` takes a key out. In ``search``, a
list of choices and a range replace each other whole. A flag, variable or method fixed above is no longer
searched below, and a flag or variable searched above is no longer fixed below.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace

from dflash_deploy import yaml_file
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.profile.schema import METHOD, VARIABLE
from dflash_deploy.yaml_file import Document, KeyPath, Origin, Problem, YamlValue

_ENVIRONMENT, _SEARCH = "env", "search"
SETTING = "--set "
"""How the source of a value that was given on the command line begins."""


def merge(below: Document, above: Document) -> Document:
    """``above`` laid over ``below``; every value keeps the place where it was written."""
    if isinstance(above.value, dict):
        for place in _decided(above.value):
            below = _without(below, place)
    value = _merged(below.value, above.value, ())
    origins: dict[KeyPath, Origin] = {}
    for key in _paths(value, ()):
        origins[key] = above.origins[key] if key in above.origins else below.origin(key)
    return Document(value, origins)


def _decided(above: dict[str, YamlValue]) -> Iterator[tuple[str, str]]:
    """Places below that what stands above has decided in another way."""
    for part in ("flags", _ENVIRONMENT, _SEARCH, "speculation"):
        names = above.get(part)
        for name in names if isinstance(names, dict) else ():
            if part == "flags":
                yield _SEARCH, name
            elif part == _ENVIRONMENT:
                yield _SEARCH, f"{VARIABLE}{name}"
            elif part == _SEARCH and name.startswith(VARIABLE):
                yield _ENVIRONMENT, name.removeprefix(VARIABLE)
            elif part == _SEARCH:
                yield "flags", name
            elif name == METHOD:
                yield _SEARCH, METHOD


def override(document: Document, setting: str) -> Document:
    """Apply one ``key=value`` from the command line; the value, written as YAML, replaces what was there.

    Raises:
        DeployError: not of the form ``key=value``, not YAML, or null for a key that is not there.
    """
    name, equals, written = setting.partition("=")
    parts = name.split(".")
    if not equals or not name.isprintable() or not all(part.strip() == part and part for part in parts):
        raise DeployError(
            f"--set {yaml_file.describe(setting)}: expected key=value with a key such as workload.users",
            exit_code=ExitCode.USAGE,
        )
    if len(parts) > yaml_file.MAX_DEPTH:
        raise DeployError(f"--set {name[:80]}: too many parts in the key", exit_code=ExitCode.USAGE)
    if parts[:2] == [_SEARCH, _ENVIRONMENT] and len(parts) > 2:
        # The one key that has a dot in itself.
        parts[1:3] = [f"{VARIABLE}{parts[2]}"]
    source = f"{SETTING}{name}"
    key: KeyPath = tuple(parts)
    try:
        given = yaml_file.parse(written, source)
    except yaml_file.InvalidDocument as error:
        # Lines and columns of a command line help nobody.
        raise yaml_file.InvalidDocument(
            replace(problem, key=(), origin=Origin(source)) for problem in error.problems
        ) from error
    value = given.value
    if key[0] == _ENVIRONMENT and len(key) == 2 and isinstance(value, bool | int | float):
        # A variable is text: 007 and 1.50 are passed on as they were typed.
        value = written.strip()
    if value is None and key not in document.origins:
        siblings = [path[-1] for path in document.origins if path and path[:-1] == key[:-1]]
        hint = yaml_file.nearest(parts[-1], (name for name in siblings if isinstance(name, str)))
        message = f"there is no such key to take out{hint}"
        raise yaml_file.InvalidDocument([Problem((), message, Origin(source))])
    for part in reversed(parts):
        value = {part: value}
    inner = {(*key, *path): Origin(source) for path in given.origins}
    outer = {key[:depth]: Origin(source) for depth in range(1, len(key))}
    return merge(_without(document, key), Document(value, outer | inner))


def without_items(document: Document, key: str, indexes: Container[int]) -> Document:
    """The document less these items of the list at ``key``."""
    items = document.value.get(key) if isinstance(document.value, dict) else None
    if not isinstance(document.value, dict) or not isinstance(items, list):
        return document
    kept = [index for index in range(len(items)) if index not in indexes]
    value = document.value | {key: [items[index] for index in kept]}
    moved = {old: new for new, old in enumerate(kept)}
    origins: dict[KeyPath, Origin] = {}
    for path, origin in document.origins.items():
        if len(path) < 2 or path[0] != key:
            origins[path] = origin
        elif isinstance(path[1], int) and path[1] in moved:
            origins[(key, moved[path[1]], *path[2:])] = origin
    return Document(value, origins)


def _merged(below: YamlValue, above: YamlValue, key: KeyPath) -> YamlValue:
    if not isinstance(above, dict) or not isinstance(below, dict):
        return above
    if len(key) == 2 and key[0] == _SEARCH and ("choices" in above) != ("choices" in below):
        return above
    merged = dict(below)
    for name, value in above.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merged(below.get(name), value, (*key, name))
    return merged


def _without(document: Document, key: KeyPath) -> Document:
    """The document less what stands at ``key``, so that a mapping there is replaced and not merged into."""

    def less(value: YamlValue, rest: KeyPath) -> YamlValue:
        if not isinstance(value, dict) or rest[0] not in value:
            return value
        if len(rest) == 1:
            return {name: item for name, item in value.items() if name != rest[0]}
        return {name: less(item, rest[1:]) if name == rest[0] else item for name, item in value.items()}

    return Document(less(document.value, key), document.origins)


def _paths(value: YamlValue, key: KeyPath) -> Iterator[KeyPath]:
    yield key
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _paths(item, (*key, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _paths(item, (*key, index))

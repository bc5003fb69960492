"""Compose files and Kubernetes manifests: every mapping in them that holds a command."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from dflash_deploy.engine.sglang.pasted.launch import Found, in_container
from dflash_deploy.engine.sglang.pasted.shell import Shell
from dflash_deploy.engine.sglang.pasted.words import Growth, Notes, Word, shown
from dflash_deploy.errors import DeployError, ExitCode

_YAML = re.compile(
    r"(?m)^(?:services|version|apiVersion|kind|name|x-[\w-]+"
    r"|[ \t]*-?[ \t]*(?:command|args|image|entrypoint))[ \t]*:(?:[ \t]|$)"
)
_MAX_DEPTH = 32
_MAX_VALUES = 20_000
_INTERPOLATED = re.compile(
    r"\$\$|\$\((?P<kubernetes>[A-Za-z_][\w.-]*)\)|\$(?P<plain>[A-Za-z_]\w*)"
    r"|\$\{(?P<name>[A-Za-z_]\w*)(?:(?P<operator>:?[-?+])(?P<rest>[^{}]*))?\}"
)

Tree = str | None | list["Tree"] | dict[str, "Tree"]
"""YAML with its plain values as they are written: ``0.90`` stays ``0.90``."""


def looks_like_yaml(text: str) -> bool:
    """It has keys that a compose file or a manifest has."""
    return _YAML.search(text) is not None


def read_trees(text: str, source: str) -> list[Tree]:
    """The documents of a YAML text, bounded, anchors and merged keys resolved.

    Raises:
        DeployError: it is no YAML, or too deep or too large.
    """
    try:
        _check_shape(text)
        builder = _Builder()
        return [builder.tree(node) for node in yaml.compose_all(text, Loader=_Loader) if node is not None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{source}:{mark.line + 1}" if mark else source
        said = getattr(error, "problem", None) or " ".join(str(error).split())
        raise DeployError(
            f"{place}: not YAML: {shown(str(said), 200)}",
            fix="paste the file as it is, with its indentation",
            exit_code=ExitCode.INVALID_INPUT,
        ) from error


def in_trees(trees: Sequence[Tree], notes: Notes) -> Iterator[Found]:
    """The commands in these documents that start SGLang."""
    for tree in trees:
        for mapping in _mappings(tree):
            found = _in_mapping(mapping, notes)
            if found is not None:
                yield found


def _in_mapping(mapping: Mapping[str, Tree], notes: Notes) -> Found | None:
    if not any(isinstance(mapping.get(key), str | list) for key in ("entrypoint", "command", "args")):
        return None
    growth = Growth("the container's command")
    env = dict(_environment(mapping.get("environment"))) | dict(_environment(mapping.get("env")))
    resolved: dict[str, str] = {}
    for name, value in env.items():
        resolved[name] = _interpolated(value, {}, growth)[0]
    if "env_file" in mapping:
        notes.add("the variables in env_file are not read")
    image = mapping.get("image")
    words: list[Word] = []
    for key in ("entrypoint", "command", "args"):
        words += _command_words(mapping.get(key), resolved, growth, notes)
    found = in_container(
        words, resolved, _interpolated(image, {}, growth)[0] if isinstance(image, str) else "", notes
    )
    return None if found is None else replace(found, line=0)


def _command_words(value: Tree, env: Mapping[str, str], growth: Growth, notes: Notes) -> list[Word]:
    if isinstance(value, str):
        text, unknown = _interpolated(value, env, growth)
        if "-c" not in text.split():
            # A command in several lines of YAML is one command, unless a shell reads it.
            text = " ".join(text.replace("\\\n", " ").splitlines())
        names = {re.sub(r"\W", "", part) for part in unknown}
        statements = Shell(text, notes, {k: v for k, v in env.items() if k not in names}).statements()
        return [word for statement in statements for word in statement.words]
    words = []
    for item in value if isinstance(value, list) else ():
        if isinstance(item, str):
            text, unknown = _interpolated(item, env, growth)
            words.append(Word(text, unknown))
    return words


def _environment(value: Tree) -> Iterator[tuple[str, str]]:
    """``A: b``, ``- A=b`` and Kubernetes' ``- {name: A, value: b}``."""
    if isinstance(value, dict):
        for name, setting in value.items():
            if isinstance(setting, str):
                yield name, setting
    for item in value if isinstance(value, list) else ():
        if isinstance(item, str) and "=" in item:
            name, _, setting = item.partition("=")
            yield name, setting
        elif isinstance(item, dict):
            name_of, setting_of = item.get("name"), item.get("value")
            if isinstance(name_of, str) and isinstance(setting_of, str):
                yield name_of, setting_of


def _interpolated(text: str, env: Mapping[str, str], growth: Growth) -> tuple[str, tuple[str, ...]]:
    """A value with its variables replaced by their defaults; the file's own surroundings are not known."""
    unknown: list[str] = []

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        name = match["kubernetes"] or match["plain"] or match["name"]
        if match["kubernetes"] and name in env:
            growth.add(len(env[name]))
            return env[name]
        operator = match["operator"]
        if operator in (":-", "-"):
            return match["rest"]
        if operator in (":+", "+"):
            return ""
        unknown.append(match[0])
        return match[0]

    return _INTERPOLATED.sub(value, text), tuple(unknown)


def _mappings(tree: Tree) -> Iterator[Mapping[str, Tree]]:
    waiting = [tree]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting += reversed(list(value.values()))
        elif isinstance(value, list):
            waiting += reversed(value)


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _check_shape(text: str) -> None:
    """Depth and number of values, before anything is built that recurses."""
    depth = 0
    for values, event in enumerate(yaml.parse(text, Loader=_Loader)):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _MAX_DEPTH:
            raise yaml.YAMLError(f"nested deeper than {_MAX_DEPTH} levels")
        if values > 4 * _MAX_VALUES:
            raise yaml.YAMLError(f"more than {_MAX_VALUES} values")


class _Builder:
    """Plain values from nodes. An alias is built each time it stands, so that the count bounds its growth."""

    def __init__(self) -> None:
        self._values = 0

    def tree(self, node: yaml.Node, depth: int = 0) -> Tree:
        self._values += 1
        if self._values > _MAX_VALUES or depth > 2 * _MAX_DEPTH:
            raise yaml.YAMLError(f"more than {_MAX_VALUES} values, or aliases that hold themselves")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.tree(item, depth + 1) for item in node.value]
        is_nothing = node.tag == "tag:yaml.org,2002:null"
        return None if is_nothing else str(node.value)

    def _mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Tree]:
        merged: dict[str, Tree] = {}
        own: dict[str, Tree] = {}
        for key, value in node.value:
            built = self.tree(value, depth + 1)
            if key.tag == "tag:yaml.org,2002:merge":
                for one in built if isinstance(built, list) else [built]:
                    if isinstance(one, dict):
                        merged = {**one, **merged}
            elif isinstance(key, yaml.ScalarNode):
                own[str(key.value)] = built
        return {**merged, **own}

"""Places in Python source found by their structure: patterns in Python's own syntax, with names for parts.

``torch.matmul($hidden, $weight[:$rows].T)`` matches that expression however it is laid out, and names three
parts of it. ``...`` among arguments stands for any further ones, and among statements for any statements. The
source is only ever parsed, never run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

Function = ast.FunctionDef | ast.AsyncFunctionDef
Bindings = Mapping[str, ast.expr]

_CAPTURE = re.compile(r"\$([a-z_]+)")
PARAMETER = re.compile(r"\$\{([a-z_]+)\}")
"""A parameter of the patch in a replacement."""
_CAPTURED = "_capture_"
# Where in the file a node stands, and whether a name is read or written, is no part of its structure.
_LAYOUT_FIELDS = frozenset({"ctx", "type_comment", "kind", "type_params"})


@dataclass(frozen=True)
class Match:
    """A node that a pattern fits, and its named parts."""

    node: ast.expr | ast.stmt
    parts: Bindings


@dataclass(frozen=True)
class Definition:
    """A function or method by its qualified name (``Class.method``), and the top-level statement it is in."""

    name: str
    node: Function
    statement: ast.stmt


def parse_pattern(pattern: str) -> ast.expr | ast.stmt:
    """The pattern's own tree.

    Raises:
        ValueError: it is not one expression or statement.
    """
    try:
        body = ast.parse(_CAPTURE.sub(rf"{_CAPTURED}\1", pattern.strip())).body
    except SyntaxError as error:
        raise ValueError(f"pattern {pattern!r} is not Python: {error.msg}") from error
    if len(body) != 1:
        raise ValueError(f"pattern {pattern!r} is not one expression or statement")
    return body[0].value if isinstance(body[0], ast.Expr) else body[0]


def capture_names(text: str) -> frozenset[str]:
    """Names written as ``$name`` in a pattern or a replacement."""
    return frozenset(_CAPTURE.findall(text))


def parameter_names(text: str) -> frozenset[str]:
    """Names written as ``${name}`` in a replacement."""
    return frozenset(PARAMETER.findall(text))


def definitions(module: ast.Module) -> Iterator[Definition]:
    """Every function of a module, with those in classes, functions and ``if`` or ``try`` blocks."""
    for statement in module.body:
        yield from _definitions(statement, "", statement)


def named(module: ast.Module, names: Sequence[str]) -> list[Definition]:
    """Functions whose qualified name fits one of ``names`` (``*`` stands for any part)."""
    return [one for one in definitions(module) if any(fnmatchcase(one.name, name) for name in names)]


def defined_names(module: ast.Module) -> frozenset[str]:
    """Qualified names of every class and function of a module."""
    found: set[str] = set()
    for statement in module.body:
        _collect_names(statement, "", found)
    return frozenset(found)


def find(pattern: str, within: ast.AST, where: Mapping[str, str] | None = None) -> list[Match]:
    """Every place in ``within`` that fits, in the order of the source.

    Args:
        pattern: as in this module's text.
        within: tree to search, its own root included.
        where: for a named part the source that it must equal.
    """
    wanted = parse_pattern(pattern)
    required = {name: parse_pattern(source) for name, source in (where or {}).items()}
    matches = []
    for node in ast.walk(within):
        parts: dict[str, ast.expr] = {}
        if (
            isinstance(node, ast.expr | ast.stmt)
            and _fits(wanted, node, parts)
            and all(name in parts and _same(parts[name], source) for name, source in required.items())
        ):
            matches.append(Match(node, parts))
    return sorted(matches, key=lambda match: (match.node.lineno, match.node.col_offset))


def _children(node: ast.AST) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            yield from _children(child)


def _definitions(node: ast.stmt, prefix: str, statement: ast.stmt) -> Iterator[Definition]:
    name = prefix
    if isinstance(node, ast.ClassDef | Function):
        if isinstance(node, Function):
            yield Definition(prefix + node.name, node, statement)
        name = f"{prefix}{node.name}."
    for child in _children(node):
        yield from _definitions(child, name, statement)


def _collect_names(node: ast.stmt, prefix: str, found: set[str]) -> None:
    name = prefix
    if isinstance(node, ast.ClassDef | Function):
        found.add(prefix + node.name)
        name = f"{prefix}{node.name}."
    for child in _children(node):
        _collect_names(child, name, found)


def _capture(node: object) -> str | None:
    if isinstance(node, ast.Name) and node.id.startswith(_CAPTURED):
        return node.id.removeprefix(_CAPTURED)
    return None


def _is_ellipsis(node: object) -> bool:
    if isinstance(node, ast.Expr):
        node = node.value
    return isinstance(node, ast.Constant) and node.value is ...


def _fits(pattern: object, node: object, parts: dict[str, ast.expr]) -> bool:
    name = _capture(pattern)
    if name is not None:
        if not isinstance(node, ast.expr):
            return False
        return _same(parts.setdefault(name, node), node)
    if isinstance(pattern, list):
        return isinstance(node, list) and _list_fits(pattern, node, parts)
    if not isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and pattern == node
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.Call) and isinstance(node, ast.Call):
        return _call_fits(pattern, node, parts)
    return all(
        _fits(getattr(pattern, field, None), getattr(node, field, None), parts)
        for field in pattern._fields
        if field not in _LAYOUT_FIELDS
    )


def _call_fits(pattern: ast.Call, call: ast.Call, parts: dict[str, ast.expr]) -> bool:
    if not _fits(pattern.func, call.func, parts) or not _list_fits(pattern.args, call.args, parts):
        return False
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    wanted = {keyword.arg: keyword.value for keyword in pattern.keywords}
    if any(name not in given or not _fits(value, given[name], parts) for name, value in wanted.items()):
        return False
    return len(given) == len(wanted) or any(map(_is_ellipsis, pattern.args))


def _list_fits(patterns: Sequence[object], nodes: Sequence[object], parts: dict[str, ast.expr]) -> bool:
    if not patterns:
        return not nodes
    if _is_ellipsis(patterns[0]):
        for skipped in range(len(nodes) + 1):
            tried = dict(parts)
            if _list_fits(patterns[1:], nodes[skipped:], tried):
                parts.update(tried)
                return True
        return False
    return bool(nodes) and _fits(patterns[0], nodes[0], parts) and _list_fits(patterns[1:], nodes[1:], parts)


def _same(one: ast.AST, other: ast.AST) -> bool:
    return one is other or ast.dump(one) == ast.dump(other)

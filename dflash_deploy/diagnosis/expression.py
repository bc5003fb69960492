"""The small language of the catalogue: conditions over figures, and texts with figures in them.

A condition or figure is an expression such as ``slots // ratio == 0`` or ``up(minimum, 2)``: numbers, texts,
names, arithmetic, comparisons, ``and or not``, ``a if b else c`` and the functions below. Nothing else of
Python is in it, and nothing is ever evaluated as Python.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Value = int | float | str | bool

_LONGEST = 400
_PLACE = re.compile(r"\{([^{}]{1,300})\}")
_FORMAT = re.compile(r",?(?:\.\d)?[dfg]?")
_MIB = {"b": 2**-20, "bytes": 2**-20, "kib": 2**-10, "kb": 2**-10, "mib": 1, "mb": 1, "gib": 1024, "gb": 1024}
_ARITHMETIC: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ORDER: Mapping[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class UndefinedError(Exception):
    """A name has no value here, or the arithmetic has no result."""


class ExpressionError(ValueError):
    """The catalogue holds an expression that is not in the language."""


def _scaled(value: float, digits: float, rounding: Callable[[float], int]) -> float:
    scale = 10.0 ** int(digits)
    # A figure such as 0.74 is not 73.99… hundredths: what binary numbers add is taken off first.
    return rounding(round(value * scale, 6)) / scale


def _mib(value: float, unit: Value) -> float:
    factor = _MIB.get(str(unit).lower())
    if factor is None:
        raise UndefinedError(f"{unit} is no unit of memory")
    return value * factor


@dataclass(frozen=True)
class Expression:
    """One expression, parsed and found to be in the language."""

    text: str
    tree: ast.expr

    def value(self, names: Mapping[str, Value]) -> Value:
        """What it comes to.

        Raises:
            UndefinedError: a name it needs is not there, or there is no result.
        """
        try:
            return _value(self.tree, names)
        except (ZeroDivisionError, OverflowError, TypeError, ValueError) as error:
            raise UndefinedError(f"{self.text}: {error}") from error

    def holds(self, names: Mapping[str, Value]) -> bool:
        """Whether it is true; not so where it has no value."""
        try:
            return bool(self.value(names))
        except UndefinedError:
            return False


def parse(text: str) -> Expression:
    """Parse an expression.

    Raises:
        ExpressionError: it is not in the language.
    """
    if len(text) > _LONGEST:
        raise ExpressionError(f"expression of {len(text)} characters: {text[:60]}…")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ExpressionError(f"{text!r}: {error.msg}") from error
    _check(tree, text)
    return Expression(text, tree)


@dataclass(frozen=True)
class Template:
    """A text with expressions in braces, each with a number format after a colon or none."""

    text: str
    parts: tuple[str | tuple[Expression, str], ...]

    def render(self, names: Mapping[str, Value]) -> str:
        """The text with its figures.

        Raises:
            UndefinedError: a figure is not known.
        """
        return "".join(
            part if isinstance(part, str) else _shown(part[0].value(names), part[1]) for part in self.parts
        )

    @property
    def alone(self) -> Expression | None:
        """The expression, where the text is one expression and nothing more."""
        only = self.parts[0] if len(self.parts) == 1 else None
        return only[0] if isinstance(only, tuple) else None


def parse_template(text: str) -> Template:
    """Parse a text with expressions.

    Raises:
        ExpressionError: one of them is not in the language.
    """
    parts: list[str | tuple[Expression, str]] = []
    at = 0
    for place in _PLACE.finditer(text):
        parts.append(text[at : place.start()])
        inner, colon, shape = place[1].rpartition(":")
        if not colon or not _FORMAT.fullmatch(shape):
            inner, shape = place[1], ""
        parts.append((parse(inner), shape))
        at = place.end()
    parts.append(text[at:])
    return Template(text, tuple(part for part in parts if part != ""))


def _shown(value: Value, shape: str) -> str:
    if isinstance(value, float) and not shape:
        return f"{value:.10g}"
    return format(value, shape) if shape and not isinstance(value, str) else str(value)


def _check(node: ast.expr, text: str) -> None:
    match node:
        case ast.Constant(value=bool() | int() | float() | str()) | ast.Name():
            return
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            inner = [left, right]
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            inner = [operand]
        case ast.BoolOp(values=values):
            inner = values
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _ORDER or isinstance(
            op, ast.Eq | ast.NotEq | ast.In | ast.NotIn
        ):
            inner = [left, right]
        case ast.IfExp(test=test, body=body, orelse=orelse):
            inner = [test, body, orelse]
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if (
            name in _FUNCTIONS or name == "known"
        ):
            inner = arguments
        case _:
            raise ExpressionError(f"{text!r}: {type(node).__name__} is not in the language")
    for part in inner:
        _check(part, text)


def _value(node: ast.expr, names: Mapping[str, Value]) -> Value:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=name):
            if name not in names:
                raise UndefinedError(f"{name} is not known")
            return names[name]
        case ast.BinOp(left=left, op=op, right=right):
            return _ARITHMETIC[type(op)](_number(_value(left, names)), _number(_value(right, names)))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, names)
        case ast.UnaryOp(operand=operand):
            return -_number(_value(operand, names))
        case ast.BoolOp(op=ast.And(), values=values):
            return all(_value(part, names) for part in values)
        case ast.BoolOp(values=values):
            return any(_value(part, names) for part in values)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _compared(op, _value(left, names), _value(right, names))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _value(body if _value(test, names) else orelse, names)
        case ast.Call(func=ast.Name(id="known"), args=arguments):
            return all(isinstance(name, ast.Name) and name.id in names for name in arguments)
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return _FUNCTIONS[name](*(_value(part, names) for part in arguments))
        case _:
            raise UndefinedError(f"{type(node).__name__} has no value")


def _compared(op: ast.cmpop, left: Value, right: Value) -> bool:
    if isinstance(op, ast.Eq | ast.NotEq):
        same = left == right
        return same if isinstance(op, ast.Eq) else not same
    if isinstance(op, ast.In | ast.NotIn):
        within = str(left).lower() in str(right).lower()
        return within if isinstance(op, ast.In) else not within
    return _ORDER[type(op)](_number(left), _number(right))


def _number(value: Value) -> float:
    if isinstance(value, str):
        raise UndefinedError(f"{value!r} is no number")
    return value


_FUNCTIONS: Mapping[str, Callable[..., Value]] = {
    "up": lambda value, digits=0: _scaled(_number(value), digits, math.ceil),
    "down": lambda value, digits=0: _scaled(_number(value), digits, math.floor),
    "round": lambda value, digits=0: round(_number(value), int(digits)),
    "whole": lambda value: int(_number(value)),
    "min": lambda *values: min(map(_number, values)),
    "max": lambda *values: max(map(_number, values)),
    "mib": lambda value, unit: _mib(_number(value), unit),
    "gib": lambda value, unit: _mib(_number(value), unit) / 1024,
}

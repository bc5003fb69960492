"""The part of JSON Schema that tools and structured answers use: enough to tell wrong from right."""

from __future__ import annotations

from collections.abc import Mapping

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_DEEPEST = 50


def misfit(value: object, schema: Mapping[str, object], at: str = "the answer", depth: int = 0) -> str | None:
    """Where a value does not fit its schema, in words; None where it does. Unknown keywords demand nothing.

    Args:
        value: parsed JSON.
        schema: with ``type``, ``enum``, ``const``, ``properties``, ``required``, ``additionalProperties``,
            ``items`` and the bounds on lengths and numbers.
        at: what the value is called.
        depth: how deep it lies.
    """
    if depth > _DEEPEST:
        return f"{at} is nested too deeply"
    wanted = schema.get("type")
    kinds = [wanted] if isinstance(wanted, str) else wanted if isinstance(wanted, list) else []
    if kinds and not any(_is(value, kind) for kind in kinds):
        return f"{at} is no {' or '.join(map(str, kinds))}"
    if "const" in schema and not _same(value, schema["const"]):
        return f"{at} is not {schema['const']!r}"
    choices = schema.get("enum")
    if isinstance(choices, list) and not any(_same(value, choice) for choice in choices):
        return f"{at} is none of {', '.join(map(str, choices[:8]))}"
    if (bound := _out_of_bounds(value, schema)) is not None:
        return f"{at} {bound}"
    if isinstance(value, dict):
        return _object_misfit(value, schema, at, depth)
    items = schema.get("items")
    if isinstance(value, list) and isinstance(items, dict):
        for place, item in enumerate(value):
            if (wrong := misfit(item, items, f"{at}[{place}]", depth + 1)) is not None:
                return wrong
    return None


def _object_misfit(
    value: Mapping[str, object], schema: Mapping[str, object], at: str, depth: int
) -> str | None:
    known = schema.get("properties")
    known = known if isinstance(known, dict) else {}
    needed = schema.get("required")
    for name in needed if isinstance(needed, list) else []:
        if isinstance(name, str) and name not in value:
            return f"{at} lacks {name!r}"
    others = schema.get("additionalProperties")
    for name, item in value.items():
        inner = known.get(name, others)
        if inner is False:
            return f"{at} has {name!r}, which is not asked for"
        if isinstance(inner, dict) and (wrong := misfit(item, inner, f"{at}.{name}", depth + 1)) is not None:
            return wrong
    return None


def _same(value: object, other: object) -> bool:
    # Python takes true for one.
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _is(value: object, kind: object) -> bool:
    types = _TYPES.get(str(kind))
    if types is None:
        return True
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, float) and kind == "integer":
        return value.is_integer()
    return isinstance(value, types)


def _out_of_bounds(value: object, schema: Mapping[str, object]) -> str | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _compare(float(value), schema, "minimum", "maximum", "is")
    if isinstance(value, str):
        return _compare(len(value), schema, "minLength", "maxLength", "has as many letters as")
    if isinstance(value, list):
        return _compare(len(value), schema, "minItems", "maxItems", "has as many items as")
    return None


def _compare(size: float, schema: Mapping[str, object], least: str, most: str, words: str) -> str | None:
    low, high = schema.get(least), schema.get(most)
    if isinstance(low, int | float) and size < low:
        return f"{words} {size:g}, below {low:g}"
    if isinstance(high, int | float) and size > high:
        return f"{words} {size:g}, above {high:g}"
    return None

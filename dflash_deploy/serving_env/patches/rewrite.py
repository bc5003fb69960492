"""What a patch finds in a module, and the module's bytes once it is applied. No files are touched here."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass

from dflash_deploy.serving_env.patches import syntax
from dflash_deploy.serving_env.patches.description import WHOLE, Edit, Form, Patch, Way
from dflash_deploy.serving_env.patches.source import Replacement, Source, UnreadableSourceError

_PART = re.compile(r"\$\{([a-z_]+)\}|\$([a-z_]+)")
_MARK = "# >>> dflash-deploy patch {name}"
_END_MARK = "# <<< dflash-deploy patch {name}"
_SHOWN_LINES = 60


@dataclass(frozen=True)
class Place:
    """A node that an edit changes: in which function, what is replaced, and by what way."""

    edit: Edit
    way: Way
    function: syntax.Definition
    node: ast.expr | ast.stmt
    parts: syntax.Bindings


@dataclass(frozen=True)
class Reading:
    """A module as the patch sees it.

    Attributes:
        source: its text.
        subject: a name of it that the patch is about, or None.
        fixed: the form that needs nothing done, or None.
        refused: the form that is neither fixed nor safe to change, or None.
        places: every place to change.
        unmatched: required edits that found no place.
        marked: it carries this patch's own mark.
    """

    source: Source
    subject: str | None
    fixed: Form | None
    refused: Form | None
    places: tuple[Place, ...]
    unmatched: tuple[Edit, ...]
    marked: bool


def read(patch: Patch, source: Source) -> Reading:
    """Find the patch's anchors.

    Raises:
        UnreadableSourceError: the module does not parse, or is nested too deeply to be looked through.
    """
    try:
        return _read(patch, source)
    except RecursionError as error:
        raise UnreadableSourceError("its code is nested too deeply to be looked through") from error


def _read(patch: Patch, source: Source) -> Reading:
    functions = syntax.named(source.tree, patch.functions)
    defined = syntax.defined_names(source.tree)
    places = [place for function in functions for place in _places(patch, function)]
    found = {place.edit.what for place in places}
    return Reading(
        source,
        subject=next((name for name in patch.subject.defines if name in defined), None),
        fixed=_form(patch.fixed, functions),
        refused=_form(patch.refused, functions),
        places=tuple(places),
        unmatched=tuple(edit for edit in patch.edits if edit.required and edit.what not in found),
        marked=_MARK.format(name=patch.name) in source.text,
    )


def applied(patch: Patch, reading: Reading, parameters: Mapping[str, str], insertion: str | None) -> bytes:
    """The module's bytes with the patch in it.

    Args:
        patch: the patch.
        reading: what ``read`` found.
        parameters: a value for each of the patch's parameters.
        insertion: text of the patch's ``insert`` file.

    Raises:
        UnreadableSourceError: the places overlap, or the result would not be valid Python.
    """
    source = reading.source
    replacements: list[Replacement] = []
    for place in reading.places:
        target = place.node if place.way.part == WHOLE else place.parts[place.way.part]
        start, end = source.span(target)
        if any(one.start <= start and end <= one.end for one in replacements):
            # A part of what another edit takes in whole.
            continue
        replacements.append(Replacement(start, end, _text(source, place, parameters)))
    if insertion is not None:
        first = min((place.function.statement for place in reading.places), key=lambda node: node.lineno)
        text = syntax.PARAMETER.sub(lambda found: parameters[found[1]], insertion)
        replacements.append(_insertion(patch, source, first, text))
    return source.edited(replacements)


def unmatched_in_words(patch: Patch, reading: Reading) -> str:
    """What was looked for and not found, and the code that stands in its place."""
    lines: list[str] = []
    for edit in reading.unmatched:
        lines.append(f"not found: {edit.what}, written as one of")
        lines += [f"    {way.find}" for way in edit.ways]
    functions = syntax.named(reading.source.tree, patch.functions)
    if not functions:
        lines.append(f"no function is named {' or '.join(patch.functions)}")
    for function in functions:
        lines.append(f"found: {patch.file}: {function.name}, line {function.node.lineno}:")
        text = reading.source.segment(function.node).splitlines()
        lines += [f"    {line}" for line in text[:_SHOWN_LINES]]
        if len(text) > _SHOWN_LINES:
            lines.append(f"    ... {len(text) - _SHOWN_LINES} more lines")
    return "\n".join(lines)


def _form(forms: tuple[Form, ...], functions: list[syntax.Definition]) -> Form | None:
    for form in forms:
        for function in functions:
            if all(syntax.find(pattern, function.node) for pattern in form.all) and not any(
                syntax.find(pattern, function.node) for pattern in form.none
            ):
                return form
    return None


def _places(patch: Patch, function: syntax.Definition) -> list[Place]:
    bound: dict[str, ast.expr] = {}
    for pattern in patch.bind:
        found = syntax.find(pattern, function.node)
        if found:
            bound = dict(found[0].parts)
            break
    places: list[Place] = []
    for edit in patch.edits:
        taken: set[ast.AST] = set()
        for way in edit.ways:
            needed = syntax.capture_names(way.replace) - {WHOLE}
            for match in syntax.find(way.find, function.node, way.where):
                # A bound name keeps its meaning over one of the same name in the pattern.
                parts = {**match.parts, **bound}
                if match.node in taken or not needed <= parts.keys():
                    continue
                taken.add(match.node)
                places.append(Place(edit, way, function, match.node, parts))
    return places


def _text(source: Source, place: Place, parameters: Mapping[str, str]) -> str:
    def part(found: re.Match[str]) -> str:
        if found[1]:
            return parameters[found[1]]
        return source.segment(place.node if found[2] == WHOLE else place.parts[found[2]])

    return _PART.sub(part, place.way.replace)


def _insertion(patch: Patch, source: Source, before: ast.stmt, text: str) -> Replacement:
    decorators = getattr(before, "decorator_list", [])
    line = min([before.lineno, *(decorator.lineno for decorator in decorators)])
    marked = [
        _MARK.format(name=patch.name),
        *text.rstrip("\n").split("\n"),
        _END_MARK.format(name=patch.name),
    ]
    start = source.line_start(line)
    return Replacement(start, start, source.line_end.join([*marked, "", "", ""]))

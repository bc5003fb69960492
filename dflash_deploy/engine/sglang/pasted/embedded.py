"""Commands that stand in other text: in quotes of a program, in a list of its words, in a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator

_MOST = 64
_QUOTED = re.compile(r"'((?:[^'\\\n]|\\.){0,8000})'|\"((?:[^\"\\\n]|\\.){0,8000})\"")
_LIST = re.compile(r"[\[(]([^\[\]()]{1,16000})[\])]")
_MENTIONED = re.compile(r"`([^`\n]{1,8000})`|'([^'\n]{1,8000})'|\"([^\"\n]{1,8000})\"")
_STARTS = re.compile(r"\b(?:sglang\.launch_server|launch_server\.py|sglang serve)\b|--model(?:-path)?[= ]")
_BULLET = re.compile(r"(?m)^[ \t]*[-*+][ \t]+`?(--[A-Za-z][^`\n]{0,4000})`?[ \t]*$")
_MODEL = re.compile(r"--model(?:-path)?(?:=|$)")


def word_lists(text: str) -> Iterator[tuple[str, ...]]:
    """Lists of quoted words that hold a model's flag, as programs, Dockerfiles and editors have them."""
    for found in list(_LIST.finditer(text))[:_MOST]:
        words = tuple(
            re.sub(r"\\(.)", r"\1", one[1] if one[1] is not None else one[2])
            for one in _QUOTED.finditer(found[1])
        )
        if any(_MODEL.match(word) for word in words):
            yield words


def mentioned(text: str) -> Iterator[str]:
    """A list of flags, one a line; what stands in quotes or backticks and starts SGLang with flags."""
    flags = _BULLET.findall(text)
    if flags:
        yield " ".join(flags[:400])
    for found in _MENTIONED.finditer(text):
        inner = next(part for part in found.groups() if part is not None)
        if _STARTS.search(inner) and "--" in inner:
            yield inner

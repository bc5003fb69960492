"""Text from outside (process names, driver strings) made safe for a terminal."""

from __future__ import annotations

_LONGEST = 64


def printable(text: str, *, longest: int = _LONGEST) -> str:
    """``text`` with everything that a terminal would act on replaced by ``?``, and cut to ``longest``.

    Control characters, escape codes, direction marks, undecodable bytes and line breaks all go.
    """
    shown = "".join(character if character.isprintable() else "?" for character in text[: longest + 1])
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"

"""Documents of any length with one sentence hidden in them."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_deploy.bench.workloads.prompt import Language

_HEADING = {"en": "Section {number}", "zh-TW": "第 {number} 節"}


@dataclass(frozen=True)
class Needle:
    """A sentence, and where it lies: 0 at the document's start, 1 at its end."""

    sentence: str
    depth: float


@dataclass(frozen=True)
class Haystack:
    """Paragraphs that have nothing to do with any needle."""

    language: Language
    paragraphs: tuple[str, ...]


def hide(needle: Needle, haystack: Haystack, *, start: int, chars: int) -> str:
    """A document of about ``chars`` characters that holds the needle once.

    Args:
        needle: what is hidden.
        haystack: taken over and over, under headings that count on, so that no two sections are alike.
        start: paragraph to begin with, so that documents differ from their first words on.
        chars: the document ends with the section that reaches this.
    """
    sections: list[str] = []
    length = 0
    while not sections or length < chars - len(needle.sentence):
        number = len(sections) + 1
        heading = _HEADING[haystack.language].format(number=number * 10 + start)
        paragraph = haystack.paragraphs[(start + number) % len(haystack.paragraphs)]
        sections.append(f"{heading}\n{paragraph}")
        length += len(sections[-1]) + 2
    place = round(needle.depth * (len(sections) - 1))
    sections[place] = f"{sections[place]} {needle.sentence}"
    return "\n\n".join(sections)

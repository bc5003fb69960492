"""One line of a server's log, freed of what terminals, containers and the journal put around it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

LINE_LIMIT = 1 << 16
"""Characters of a line that are looked at; what SGLang prints of its arguments takes about 20,000."""

_ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]{0,40}[@-~]|\][^\x07\x1b]{0,400}(?:\x07|\x1b\\)?|[@-Z\\-_])")
_WRAPPED = re.compile(
    r"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S{1,100} [^\s:\[]{1,100}(?:\[\d{1,10}\])?: "  # journal, short
    r"|\d{4}-\d\d-\d\dT[\d:.,+-]{8,40}Z? \S{1,100} [^\s:\[]{1,100}\[\d{1,10}\]: "  # journal, ISO dates
    r"|[\w.-]{1,100} {1,40}\| ?"  # docker compose
    r"|\d{4}-\d\d-\d\dT[\d:.]{8,30}(?:Z|[+-]\d\d:?\d\d) (?:std(?:out|err) [FP] )?"  # docker, kubernetes
    r")"
)
_DATED = re.compile(
    r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d{1,6})?(?P<ranks>(?: [A-Z_]{2,12}\d{1,4}){0,8})\] ?"
)


@dataclass(frozen=True)
class LogLine:
    """The text of one line.

    Attributes:
        text: what was logged, indentation kept.
        dated: SGLang's own logger wrote it, and did not merely let something through.
        first_rank: it comes from the first rank, which speaks for all.
    """

    text: str
    dated: bool
    first_rank: bool


def log_lines(raw: str) -> Iterator[LogLine]:
    """The lines in a piece of log; a progress bar's overwritten states count as lines of their own."""
    for line in raw.splitlines():
        text = _ESCAPE.sub("", line[:LINE_LIMIT])
        wrapped = _WRAPPED.match(text)
        if wrapped is not None:
            text = text[wrapped.end() :]
        dated = _DATED.match(text)
        if dated is None:
            yield LogLine(text.rstrip(), dated=False, first_rank=True)
        else:
            ranks = re.findall(r"\d+", dated["ranks"])
            yield LogLine(
                text[dated.end() :].rstrip(), dated=True, first_rank=all(int(rank) == 0 for rank in ranks)
            )

"""A line of a log, freed of what loggers, containers and people put around it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace

from dflash_deploy.engine.sglang.logline import LogLine, log_lines

_QUOTED = re.compile(r"(?:> ?|\|\s)(?=\S)")
# vLLM: (EngineCore_DP0 pid=123) ERROR 08-20 12:00:00 [core.py:718] text
_PROCESS = re.compile(r"\((?:[\w.-]{1,40} )?(?:pid|rank|TP|PP|DP)[ =:]?\d{1,10}(?:[, ][\w= ]{1,40})?\) ?")
_LEVEL = re.compile(
    r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)[: ] ?\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,6})? "
    r"\[[^\]]{1,80}\] ?"
)
# logging's own: 2026-08-20 12:00:00,123 - name - ERROR - text
_PLAIN = re.compile(
    r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,6})? ?(?:[-|] ?)?(?:[\w.]{1,60} ?[-|:] ?)?"
    r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) ?[-|:] ?"
)
_FIELDS = ("log", "MESSAGE", "message", "msg")


def clean_lines(raw: bytes) -> Iterator[LogLine]:
    """The text lines that one line of a log holds: one, or more where it carries a whole message."""
    for line in log_lines(_message(raw)):
        text, dated = line.text, line.dated
        if not dated:
            text = _QUOTED.sub("", text, count=1) if text[:1] in ">|" else text
            text = _PROCESS.sub("", text, count=1) if text.startswith("(") else text
            level = _LEVEL.match(text)
            plain = None if level else _PLAIN.match(text)
            if level is not None:
                # vLLM puts its prefix before every line of a traceback, too.
                text, dated = text[level.end() :], level["level"] not in ("ERROR", "CRITICAL")
            elif plain is not None:
                text, dated = text[plain.end() :], True
        yield replace(line, text=text, dated=dated)


def _message(raw: bytes) -> str:
    text = raw.decode("utf-8", "replace")
    if not text.startswith('{"'):
        return text
    try:
        held = json.loads(text)
    except (ValueError, RecursionError):
        return text
    found = next((held[name] for name in _FIELDS if isinstance(held.get(name), str)), None)
    return text if found is None else found

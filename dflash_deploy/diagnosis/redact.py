"""Text that can be shown to others: without names, addresses, keys and what people wrote."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path

from dflash_deploy.diagnosis.verdict import hidden

_RULES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\beyJ[\w-]{10,2000}\.[\w-]{4,2000}\.[\w-]{0,2000}"), "<token>"),
    (re.compile(r"(?<![\w/])(?:https?|ftp)://[^\s/@'\"]{1,100}@"), "https://<user>@"),
    (
        re.compile(
            r"(['\"]?(?:prompt|text|content|input|messages|system_prompt|origin_input_text|obj)['\"]?\s?[=:]\s?)"
            r"(?:'(?:[^'\\]|\\.){1,20000}'|\"(?:[^\"\\]|\\.){1,20000}\"|\[.{1,20000}\])",
        ),
        r"\1<prompt>",
    ),
    (re.compile(r"/(home|Users|root|mnt/c/Users)/[^\s/'\":]{1,100}"), r"/\1/<user>"),
    (re.compile(r"\b[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,5}\b"), "<mail>"),
    (
        re.compile(r"(?<![\d.])(?!127\.0\.0\.1|0\.0\.0\.0)(?:\d{1,3}\.){3}\d{1,3}(?![\d.])"),
        "<address>",
    ),
    (
        re.compile(r"(?<![\w:])(?!::1?\b)(?:[0-9a-f]{1,4}:){4,7}[0-9a-f]{1,4}(?![\w:])", re.IGNORECASE),
        "<address>",
    ),
    (re.compile(r"\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b", re.IGNORECASE), "<address>"),
    (re.compile(r"\bGPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE), "GPU-<uuid>"),
    # The host's name in a journal's line.
    (
        re.compile(
            r"^((?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\S{8,40}) )\S{1,100}(?= \S{1,100}:)"
        ),
        r"\1<host>",
    ),
)


def redacted(text: str) -> str:
    """The text without host names, home folders, keys, tokens, addresses and prompts."""
    text = hidden(text)
    for pattern, instead in _RULES:
        text = pattern.sub(instead, text)
    for name in (socket.gethostname(), Path.home().name):
        if len(name) > 3 and name != "root":
            text = re.sub(rf"\b{re.escape(name)}\b", "<host>", text)
    return text

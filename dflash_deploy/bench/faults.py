"""A thin look at the answers: speed is worth nothing when the text is garbage."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence

from dflash_deploy.bench.measurement import RequestResult

_GRAM = 12
_LEAST_TEXT = 200
"""Characters below which a text says nothing about loops or scripts."""

_LEAST_NEW = 0.2
"""Distinct share of 12-character pieces: prose has over 0.9, tables and code over 0.4, a loop under 0.1."""

_MOST_UNREADABLE = 0.02
_MOST_SCRIPTS = 3
_CHARS_PER_TOKEN = (0.2, 25.0)


def find_faults(
    requests: Sequence[RequestResult], max_tokens: int | None, *, read_text: bool = True
) -> tuple[str, ...]:
    """What is wrong with the answers, one line a fault: its id, how many answers have it, an example.

    Args:
        requests: answers that ended without an error.
        max_tokens: tokens that each answer must have exactly, None where it might end by itself.
        read_text: judge the text too, and not the counts alone.
    """
    found: dict[str, list[str]] = {}
    for request in requests:
        faults = _count_faults(request, max_tokens)
        if read_text:
            faults |= _text_faults(request)
        for fault, example in faults.items():
            found.setdefault(fault, []).append(example)
    texts = {request.text for request in requests}
    if read_text and len(requests) > 1 and len(texts) == 1 and len(next(iter(texts))) >= _LEAST_TEXT:
        found["same-answer"] = [_excerpt(requests[0].text)] * len(requests)
    return tuple(
        f"{fault}: {len(examples)} of {len(requests)} answers, for example {examples[0]}"
        for fault, examples in found.items()
    )


def _count_faults(request: RequestResult, max_tokens: int | None) -> dict[str, str]:
    faults: dict[str, str] = {}
    if max_tokens is not None and request.output_tokens != max_tokens:
        faults["wrong-count"] = f"{request.output_tokens} tokens by usage where {max_tokens} were asked for"
    elif request.output_tokens < request.chunks:
        faults["wrong-count"] = f"{request.output_tokens} tokens by usage in {request.chunks} chunks"
    return faults


def _text_faults(request: RequestResult) -> dict[str, str]:
    text = request.text
    if not text.strip():
        return {"empty": f"no text in {request.output_tokens} tokens"}
    faults: dict[str, str] = {}
    unreadable = sum(_unreadable(char) for char in text)
    if unreadable > max(2, _MOST_UNREADABLE * len(text)):
        faults["mojibake"] = f"{unreadable} unreadable characters in {_excerpt(text)}"
    least, most = _CHARS_PER_TOKEN
    if request.output_tokens and not least <= len(text) / request.output_tokens <= most:
        faults["length"] = f"{len(text)} characters in {request.output_tokens} tokens"
    if len(text) >= _LEAST_TEXT:
        pieces = len(text) - _GRAM + 1
        if len({text[at : at + _GRAM] for at in range(pieces)}) < _LEAST_NEW * pieces:
            faults["repetition"] = f"… {_excerpt(text[-80:])}"
        scripts = _scripts(text)
        if len(scripts) > _MOST_SCRIPTS:
            faults["mixed-scripts"] = f"{', '.join(sorted(scripts))} in {_excerpt(text)}"
    return faults


def _unreadable(char: str) -> bool:
    return char == "\ufffd" or (
        unicodedata.category(char) in {"Cc", "Co", "Cn", "Cs"} and char not in "\n\r\t"
    )


def _scripts(text: str) -> set[str]:
    """Writing systems that hold more than one letter in fifty."""
    # A letter's name begins with its script; a text has far fewer letters than places.
    letters = Counter(char for char in text if char.isalpha())
    counts: Counter[str] = Counter()
    for char, count in letters.items():
        counts[unicodedata.name(char, "UNNAMED").split()[0].split("-")[0]] += count
    return {script for script, count in counts.items() if count * 50 > letters.total()}


def _excerpt(text: str, length: int = 60) -> str:
    short = text if len(text) <= length else f"{text[: length - 1]}…"
    return repr(short)

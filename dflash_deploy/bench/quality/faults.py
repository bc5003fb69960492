"""A look at the answers that a load left behind."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_deploy.bench.measurement import RequestResult
from dflash_deploy.bench.quality.text import excerpt, text_faults

_LEAST_SAME = 200
"""Characters of an answer that cannot be right for two questions."""


def find_faults(
    requests: Sequence[RequestResult],
    max_tokens: int | None,
    *,
    most_tokens: int | None = None,
    read_text: bool = True,
    free_end: bool | None = None,
) -> tuple[str, ...]:
    """What is wrong with the answers, one line a fault: its id, how many answers have it, an example.

    Args:
        requests: answers that ended without an error.
        max_tokens: tokens that each answer must have exactly, if it does not end freely; None where all may.
        most_tokens: that an answer may have at most, if it does not end freely.
        read_text: judge the text too, and not the counts alone.
        free_end: answers may end by themselves; None where ``max_tokens`` says so.
    """
    found: dict[str, list[str]] = {}
    for request in requests:
        exact = None if request.ends_freely or request.tokens_estimated else max_tokens
        most = None if request.ends_freely or request.tokens_estimated else most_tokens
        faults = _count_faults(request, exact, most)
        if read_text:
            free = request.ends_freely or (exact is None if free_end is None else free_end)
            # Events that hold several tokens each were counted as one each.
            tokens = None if request.tokens_estimated else request.output_tokens - request.hidden_tokens
            faults |= text_faults(request.text, tokens, free_end=free, forced_on=not (free or request.long))
        for fault, example in faults.items():
            found.setdefault(fault, []).append(example)
    texts = {request.text for request in requests}
    several = len({request.prompt_id for request in requests}) > 1
    if read_text and several and len(texts) == 1 and len(next(iter(texts))) >= _LEAST_SAME:
        found["same-answer"] = [excerpt(requests[0].text)] * len(requests)
    return tuple(
        f"{fault}: {len(examples)} of {len(requests)} answers, for example {examples[0]}"
        for fault, examples in found.items()
    )


def _count_faults(request: RequestResult, exact: int | None, most: int | None) -> dict[str, str]:
    faults: dict[str, str] = {}
    if exact is not None and request.output_tokens != exact:
        faults["wrong-count"] = f"{request.output_tokens} tokens by usage where {exact} were asked for"
    elif most is not None and request.output_tokens > most:
        faults["wrong-count"] = f"{request.output_tokens} tokens by usage where {most} were allowed"
    elif request.output_tokens < request.chunks:
        faults["wrong-count"] = f"{request.output_tokens} tokens by usage in {request.chunks} chunks"
    return faults

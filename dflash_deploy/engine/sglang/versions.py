"""Facts about SGLang that change from release to release: the one table of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

NEWEST = "0.5.23"
"""The release that this tool is written and tested against."""

RELEASES = (
    "0.5.14",
    "0.5.15",
    "0.5.15.post1",
    "0.5.16",
    "0.5.17",
    "0.5.18",
    "0.5.19",
    "0.5.20",
    "0.5.21",
    "0.5.22",
    NEWEST,
)

_VERSION = re.compile(
    r"v?(?P<release>\d{1,6}(?:\.\d{1,6}){1,3})"
    r"(?:\.?rc(?P<rc>\d{1,6}))?"
    r"(?:\.post(?P<post>\d{1,9}))?"
    r"(?:\.?dev(?P<dev>\d{1,12}))?"
    r"(?:\+(?P<local>[a-z0-9._-]{1,80}))?",
    re.IGNORECASE,
)

# Builds from the main branch carry the number of an old tag (0.5.6.post3, or 0.0.0), which says nothing of
# their age; their commit does. The release named is the first one that holds the commit.
_COMMITS = {
    "574274660": "0.5.18",
    "c14312a66": "0.5.19",
    "1cf2b8c": "0.5.19",
    "5f55db35e": "0.5.19",
}


@dataclass(frozen=True)
class Nearest:
    """A release whose facts are known, and in ``note`` why it stands in for another version."""

    release: str
    note: str | None = None


def order(version: str) -> tuple[int, ...]:
    """A key that sorts versions by age; unreadable ones sort as the oldest."""
    match = _VERSION.match(version.strip())
    if match is None:
        return (0,)
    release = [int(part) for part in match["release"].split(".")]
    release += [0] * (4 - len(release))
    post = int(match["post"] or 0)
    early = match["rc"] is not None or (match["dev"] is not None and not post)
    return (*release, post, 0 if early else 1)


def nearest(version: str) -> Nearest:
    """The known release that comes nearest to ``version``."""
    text = version.strip()
    match = _VERSION.match(text)
    if match is None:
        return Nearest(NEWEST, f"{text!r} is no SGLang version: {NEWEST} is taken")
    plain = re.sub(r"^v", "", text, flags=re.IGNORECASE).partition("+")[0]
    if plain in RELEASES:
        return Nearest(plain)
    for commit, release in _COMMITS.items():
        if f"g{commit}" in (match["local"] or ""):
            return Nearest(release, f"{text} is a build between releases: {release} comes nearest")
    if match["dev"] is not None and order(text) < order(RELEASES[0]):
        return Nearest(NEWEST, f"{text} does not say which release it comes near: {NEWEST} is taken")
    if order(text) > order(NEWEST):
        return Nearest(NEWEST, f"{text} is newer than what is known: {NEWEST} is taken")
    older = [release for release in RELEASES if order(release) <= order(text)]
    # A build on the way to a release has more of that release than of the one before.
    following = next((release for release in RELEASES if order(release) >= order(text)), NEWEST)
    release = following if match["dev"] or match["rc"] or not older else older[-1]
    return Nearest(release, f"{text} is not a known release: {release} comes nearest")


@dataclass(frozen=True)
class CardDefaults:
    """What SGLang takes where flags are left out, by the card's memory.

    Attributes:
        below_mib: the defaults hold for cards with less memory than this.
        chunk_tokens: ``--chunked-prefill-size``.
        decode_bs: ``--cuda-graph-max-bs-decode`` (below four-way tensor parallelism).
        decode_bs_wide: the same from four-way tensor parallelism on.
    """

    below_mib: float
    chunk_tokens: int
    decode_bs: int
    decode_bs_wide: int


@dataclass(frozen=True)
class VersionFacts:
    """What a release does, as far as code here depends on it.

    Attributes:
        release: the release that these are the facts of.
        dflash2: the class ``DFlash2DraftModel`` is known, so that a DFlash2 draft can be loaded.
        dspark: the algorithm DSPARK is known.
        quantized_head_plain_dflash: a plain DFlash draft works with a quantised output head (on one GPU).
        quantized_head_dflash2: a DFlash2 draft works with a quantised output head.
        exact_draft_cell: the draft's KV bytes per token come from the draft's own shape; before, the target's
            shape was taken for each of its layers.
        adds_draft_share: what a token takes in the cache of an EAGLE or MTP draft is added to the target's;
            before, the target's was multiplied, and rounded.
        window_models_count_draft: a DFlash draft's cache is counted for a target with window layers.
        capped_window_counts_draft: the same where the window pool follows from the request limit.
        capped_window_needs_chunks: that is so only where long prompts are cut into chunks.
        charges_padding_slots: sizing charges the padding slot of the state cache and of the verify buffers.
        replay_rings_by_request: the rings of ``--enable-linear-replayssm-spec`` are made for each request and
            are ``--linear-replayssm-cache-len`` long; before, for each state slot and one verify step long.
        decode_bs_follows_requests: the default of decode_bs is cut to ``--max-running-requests`` where given.
        prefill_graphs_within_context: prefill graphs are no longer than a ``--context-length`` that is given.
        unknown_memory_fraction: ``--mem-fraction-static`` where the card's memory cannot be read.
        card_defaults: by memory, smallest cards first.
        ready_endpoint: ``/ready`` answers from flags alone, without generating.
        startup_timings: the log and ``/server_info`` tell how long the parts of a start took.
        logs_request_clamp: a request limit cut by the state cache is logged; before, it was cut in silence.
        reserves_for_images: a model that sees has part of the KV budget reserved, and the log says so.
        capture_sizes_at_end: captured batch sizes stand in the line that ends a capture, not in its first.
        parallel_init_lines: ``Init parallel``, ``Memory baseline taken``; before, ``Init torch distributed``.
    """

    release: str
    dflash2: bool
    dspark: bool
    quantized_head_plain_dflash: bool
    quantized_head_dflash2: bool
    exact_draft_cell: bool
    adds_draft_share: bool
    window_models_count_draft: bool
    capped_window_counts_draft: bool
    capped_window_needs_chunks: bool
    charges_padding_slots: bool
    replay_rings_by_request: bool
    decode_bs_follows_requests: bool
    prefill_graphs_within_context: bool
    unknown_memory_fraction: float
    card_defaults: tuple[CardDefaults, ...]
    ready_endpoint: bool
    startup_timings: bool
    logs_request_clamp: bool
    reserves_for_images: bool
    capture_sizes_at_end: bool
    parallel_init_lines: bool

    def defaults_for(self, memory_mib: float) -> CardDefaults:
        """The defaults of a card with this much memory."""
        return next(row for row in self.card_defaults if memory_mib < row.below_mib)


_GIB = 1024.0
_LARGE_CARDS = (
    CardDefaults(60 * _GIB, 4096, 32, 160),
    CardDefaults(160 * _GIB, 8192, 256, 512),
    CardDefaults(float("inf"), 16384, 512, 512),
)
_SMALL_CARDS = CardDefaults(20 * _GIB, 2048, 8, 8)
_CARDS_TO_0_5_19 = (_SMALL_CARDS, CardDefaults(35 * _GIB, 2048, 24, 80), *_LARGE_CARDS)
_CARDS_FROM_0_5_20 = (_SMALL_CARDS, CardDefaults(35 * _GIB, 4096, 48, 160), *_LARGE_CARDS)


def facts(version: str) -> VersionFacts:
    """The facts of a release, or of the known one nearest to ``version``."""
    release = nearest(version).release

    def since(first: str) -> bool:
        return order(release) >= order(first)

    return VersionFacts(
        release=release,
        dflash2=since("0.5.19"),
        dspark=since("0.5.16"),
        quantized_head_plain_dflash=since("0.5.18"),
        quantized_head_dflash2=since("0.5.19"),
        exact_draft_cell=since("0.5.18"),
        adds_draft_share=since("0.5.22"),
        window_models_count_draft=since("0.5.18"),
        capped_window_counts_draft=since("0.5.23"),
        capped_window_needs_chunks=since("0.5.22"),
        charges_padding_slots=since("0.5.17"),
        replay_rings_by_request=since("0.5.20"),
        decode_bs_follows_requests=since("0.5.22"),
        prefill_graphs_within_context=not since("0.5.17"),
        unknown_memory_fraction=0.95 if since("0.5.20") else 0.88,
        card_defaults=_CARDS_FROM_0_5_20 if since("0.5.20") else _CARDS_TO_0_5_19,
        ready_endpoint=since("0.5.20"),
        startup_timings=since("0.5.17"),
        logs_request_clamp=since("0.5.17"),
        reserves_for_images=since("0.5.18"),
        capture_sizes_at_end=since("0.5.22"),
        parallel_init_lines=since("0.5.21"),
    )


def state_slots_per_request(strategy: str, *, radix_cache: bool = True, overlap: bool = True) -> int:
    """Slots of the recurrent-state cache that each running request takes, the same in every release known.

    Args:
        strategy: ``--mamba-radix-cache-strategy``. ``auto`` is taken for ``extra_buffer``, which it becomes
            for the Qwen3.5 family with the Triton linear attention and the overlap schedule on, and for
            ``no_buffer`` without that schedule.
        radix_cache: the prefix cache is on (no ``--disable-radix-cache``).
        overlap: the overlap schedule is on (no ``--disable-overlap-schedule``).
    """
    if not radix_cache:
        return 1
    if strategy == "auto":
        strategy = "extra_buffer" if overlap else "no_buffer"
    if strategy == "no_buffer":
        return 3
    return 5 if strategy == "extra_buffer" and overlap else 4

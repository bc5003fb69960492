"""What the engine does not compute: memory that is found by measuring, as a prior for a card and a model.

Each figure says what it is fitted to. They are corrected by boot logs of the machine (``calibration.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_deploy.checkpoint.cards import ModelCard
    from dflash_deploy.plan.settings import Settings

_REFERENCE_SIZE = 5120 * 64
_SMALL_SIZE = 4096 * 32


@dataclass(frozen=True)
class Terms:
    """Memory in MiB, for one card.

    Attributes:
        driver: kept by the driver; no process can have it, and tools do not count it as used.
        context: of a server before it loads anything: CUDA context, libraries and, on unified memory, the
            rest of the host.
        target_weights: what loading the whole target on one card takes, instead of what the model card says;
            ``draft_weights`` likewise.
        after_load: taken between the end of loading a draft and the sizing, beside what has a formula.
        workspace: attention workspaces and autotuning; ``workspace_draft`` for a draft's own, and with
            speculation ``workspace_request`` for each request (up to four).
        graphs: factor on the formula for decode, verify and draft graphs; ``prefill_graphs`` likewise.
        kernels: compiled and loaded when the first tokens go through.
        fragments: held by the allocator and of no use to it, three times as much beside prefill graphs;
            ``fragments_expandable`` where segments grow.
        unified: the memory is the host's too.
    """

    driver: float = 490.0
    context: float = 880.0
    target_weights: float | None = None
    draft_weights: float | None = None
    after_load: float = 18.0
    workspace: float = 430.0
    workspace_draft: float = 82.0
    workspace_request: float = 60.0
    graphs: float = 1.0
    prefill_graphs: float = 1.0
    kernels: float = 640.0
    fragments: float = 100.0
    fragments_expandable: float = 30.0
    unified: bool = False

    # driver: 32,607 MiB of an RTX 5090 are 31.36 GiB to PyTorch.
    # context: 30.5 GiB free before load on an RTX 5090, 94.22 GiB on an RTX PRO 6000.
    # after_load: the same log, less the stacked projections of the draft.
    # workspace: 0.62 GiB for two requests in that log, 0.45 GiB without speculation in another; 1.7 GiB for
    # one request and 2.2 GiB for four in two settings of an RTX 5090, graphs and kernels included.
    # kernels, fragments: those two settings, 29.8 GiB for a server without speculation, and one at the edge
    # that failed with 0.48 GiB reserved but unallocated.


_BLACKWELL = Terms()
_OLDER = Terms(driver=460.0, context=635.0)
"""22.91 and 22.93 GiB were free before load on cards of 24 GiB."""
_UNIFIED = Terms(driver=0.0, context=7950.0, unified=True)
"""113.93 GiB were free before load on a DGX Spark with nothing else running."""


def terms_for(card_memory_mib: int, compute_capability: str | None = None) -> Terms:
    """The prior for a card.

    Args:
        card_memory_mib: total memory as the driver, or the operating system, reports it.
        compute_capability: such as ``12.0``; without it cards of up to 25 GB are taken for older ones.
    """
    if 118 << 10 <= card_memory_mib <= 128 << 10 and (compute_capability or "12.1") == "12.1":
        # No card with memory of its own has such a size.
        return _UNIFIED
    major = (compute_capability or "").partition(".")[0]
    if major.isdigit():
        return _BLACKWELL if int(major) >= 10 else _OLDER
    return _OLDER if card_memory_mib <= 25 << 10 else _BLACKWELL


@dataclass(frozen=True, slots=True)
class Remainder:
    """What a start takes beyond weights and pools, in MiB."""

    workspace: float
    prefill_graphs: float
    target_graphs: float
    draft_graphs: float
    kernels: float
    fragments: float
    activations: float
    logits: float
    batches: tuple[int, ...]


def captured_batches(settings: Settings, running_requests: int) -> tuple[int, ...]:
    """Decode batch sizes that are captured: none above the running requests, which are always among them."""
    sizes = settings.graph_batches
    if not sizes:
        return ()
    kept = {size for size in sizes if size <= running_requests}
    if max(sizes) >= running_requests:
        kept.add(running_requests)
    return tuple(sorted(kept))


def requests_together(settings: Settings, running_requests: int, users: int) -> int:
    """Requests that logits are made for at once: those captured, later those of the users."""
    captured = max(captured_batches(settings, running_requests), default=0)
    return min(running_requests, max(users, captured))


def remainder_of(
    settings: Settings, terms: Terms, target: ModelCard, *, running_requests: int, users: int, has_draft: bool
) -> Remainder:
    """Graphs, workspaces, kernels and buffers of one configuration."""
    small = small_factor(target)
    batches = captured_batches(settings, running_requests)
    rows = max(batches, default=0) * max(settings.draft_tokens, 1)
    graphs = terms.graphs * small * sum(mib for mib, _ in graph_parts(len(batches), rows, settings))
    prefill = terms.prefill_graphs * small * sum(mib for mib, _ in prefill_parts(settings, target))
    activations = settings.chunk_tokens * 20 * target.hidden_size / (1 << 20) / settings.gpus**0.5
    if settings.prefill_sizes:
        # Layers between the captured parts still run one by one.
        activations /= 2
    together = requests_together(settings, running_requests, users)
    logits = 2 * together * max(settings.draft_tokens, 1) * target.vocab_size * 4 / (1 << 20)
    workspace = terms.workspace + (terms.workspace_draft if has_draft else 0.0)
    if settings.speculation:
        workspace += terms.workspace_request * min(running_requests, 4)
    fragments = terms.fragments_expandable if settings.expandable else terms.fragments
    return Remainder(
        workspace=small * workspace,
        prefill_graphs=prefill,
        target_graphs=graphs,
        draft_graphs=0.95 * graphs if has_draft else 0.0,
        kernels=terms.kernels * kernel_share(target),
        fragments=small * fragments * (3 if settings.prefill_sizes else 1),
        activations=activations,
        logits=logits,
        batches=batches,
    )


def graph_parts(count: int, rows: int, settings: Settings) -> tuple[tuple[float, str], ...]:
    """Memory of one set of decode or verify graphs in MiB, and what each part is for.

    0.13 GiB for two verify sizes beside prefill graphs, whose memory they share (0.34 for 36 decode sizes);
    alone 0.26 GiB for seven decode sizes.
    """
    if not count:
        return ()
    batches = "batch size" if count == 1 else "batch sizes"
    if settings.prefill_sizes:
        each_row = 1.5 * rows if settings.speculation else 0.0
        shared = (41 * math.sqrt(count), f"for {count} {batches} (memory shared with the prefill graphs)")
        return (51.0, "for any"), shared, (each_row, f"for {rows} rows in the largest")
    return (51.0, "for any"), (41.0 * count, f"for {count} {batches}"), (3.0 * rows, f"for {rows} rows")


def prefill_parts(settings: Settings, target: ModelCard) -> tuple[tuple[float, str], ...]:
    """Memory of the prefill graphs in MiB, and what each part is for.

    1.42 GiB for 42 sizes up to 2,048 tokens, of which the largest took 1.25; 1.71 for 58 up to 8,192 on a
    model of half the size.
    """
    if not settings.prefill_sizes:
        return ()
    largest, count = max(settings.prefill_sizes), len(settings.prefill_sizes)
    size = min(1.5, target.hidden_size * target.layers / _REFERENCE_SIZE)
    buffers = 1280 * (largest / 2048) ** 0.6 * size
    return (4.2 * count, f"for {count} token counts"), (buffers, f"for the largest, {largest:,} tokens")


def kernel_share(target: ModelCard) -> float:
    """Share of the fitted figure for kernels that a model takes: fewer without a recurrent state."""
    return small_factor(target) * (1.0 if target.linear is not None else 0.4)


def small_factor(target: ModelCard) -> float:
    """Share of the fitted figures that a small model takes."""
    return min(1.0, target.hidden_size * target.layers / _SMALL_SIZE)

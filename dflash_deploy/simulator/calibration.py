"""Constants fitted to published measurements; what each one is fitted to stands beside it."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dflash_deploy.simulator.shipped import CardFacts


@dataclass(frozen=True)
class CardCalibration:
    """How one card behaves beyond its data sheet.

    Attributes:
        context_gib: memory that the CUDA context and the host's other users take before anything is loaded.
        step_ms: fixed cost of one pass through the target (launches, sampling, scheduling).
        row_ms: cost of each token row that a pass verifies.
        draft_ms: fixed cost of drafting one block.
        prefill_tokens_per_s: prompt tokens a second at short contexts.
        boot_factor: how much slower than the reference host it loads and captures.
        weight_speed: share of the usual bandwidth that a weight format reaches on this card.
    """

    context_gib: float
    step_ms: float
    row_ms: float
    draft_ms: float
    prefill_tokens_per_s: float
    boot_factor: float = 1.0
    weight_speed: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


CARDS: Mapping[str, CardCalibration] = MappingProxyType(
    {
        # step: 62.14 tokens/s plain; draft: 207.52 tokens/s with DFlash2; row: 192.30 for each of four users;
        # context: between the 500 and 900 MiB that leave the published 29,076 MiB room for a KV pool.
        "rtx-5090": CardCalibration(0.68, 4.43, 0.015, 1.92, 6000),
        # step: 65.59 tokens/s plain; draft: steps of 20.5 ms in a public log; context: 94.22 GiB free at
        # load; FP8: 108.75 tokens/s with DFlash2.
        "rtx-pro-6000": CardCalibration(1.37, 3.55, 0.015, 1.45, 7000, weight_speed={"fp8": 0.60}),
        # draft and row: the two published DFlash2 figures, 90 and 109 tokens/s, and MTP at 60.
        "rtx-4090": CardCalibration(0.55, 3.5, 1.5, 1.5, 3000, 1.1),
        # step: 45.75 tokens/s plain; draft: 110 to 139 tokens/s with DFlash2.
        "rtx-3090": CardCalibration(0.45, 2.9, 0.1, 2.3, 1900, 1.3),
        # step: 12.56 tokens/s plain; row: 194 to 429 tokens/s in all at 8 and 16 users.
        "dgx-spark": CardCalibration(7.77, 3.6, 0.4, 0.8, 900, 8.0),
        # step: 68.8 tokens/s plain; draft: 184 to 236 tokens/s with DFlash2, by task.
        "h200": CardCalibration(1.2, 1.85, 0.01, 4.9, 9000),
        # step: 28.9 tokens/s plain; draft: the one published DFlash2 figure, 59.1 tokens/s, engine not
        # stated.
        "a100-80gb": CardCalibration(0.9, 4.9, 0.1, 34.0, 4500),
    }
)


def card_calibration(card: CardFacts) -> CardCalibration:
    """Constants of a card; one that nobody published figures of behaves like its nearest kin."""
    known = CARDS.get(card.id)
    if known is not None:
        return known
    slow = 170 / max(card.sms, 1)
    return CardCalibration(0.68, 4.0, 0.015 * slow, 2.0, 6000 / slow, 1.0)


# Share of the data-sheet bandwidth that weights are read at; with the step costs above it fits every plain
# figure.
BANDWIDTH_SHARE = 0.85

# Eager passes are bound by the host launching kernels: 63.85 tokens/s with decode graphs off on an RTX
# 5090, while a GB10, slower than its host, loses next to nothing; a lost draft graph costs 173.0 against
# 204.7 tokens/s.
EAGER_TARGET_MS = 28.0
EAGER_VERIFY_MS = 60.8
EAGER_DRAFT_MS = 8.4

# A pass through the MTP layer, beside reading it and the head: 141 tokens/s on an RTX PRO 6000.
MTP_STEP_MS = 0.85
NGRAM_LOOKUP_MS = 0.4

# Row counts that the small-batch FP8 kernels of compute capability 12.0 know; others take the general path.
FAST_ROWS = frozenset({1, 2, 4, 8, 9})
SLOW_ROWS_MS = 0.25

# torch.compile with decode graphs: 9.8 to 10.2 tokens/s instead of 59.4 plain, 93.5 with DFlash2.
COMPILE_PLAIN = 6.0
COMPILE_VERIFY = 2.2

TRITON_ATTENTION = 1.03

# Prefill: 222 ms to the first token for the median of four users who ask at once (the first alone, three
# together), 1.16 s in the first round after a start, when kernels are still compiled.
PREFILL_EAGER_MS = 92.0
PREFILL_GRAPH_MS = 38.0
ATTENTION_S_PER_PAIR = 9.6e-10
"""Prompt attention for each pair of tokens, at 7,000 tokens/s: 6,163 tokens/s at 64K on a PRO 6000."""
COLD_PREFILL_S = 0.94
COLD_DECODE_S = 0.45
TOKENIZE_S = 0.002

# Memory after the pools (GiB). The published 29,076 MiB for one request and 31,211 MiB for four; a public
# boot log of an RTX PRO 6000 (0.62 workspace, 1.42 prefill graphs at 2,048 tokens, 0.13 and 0.12 verify and
# draft graphs).
WORKSPACE_GIB = 0.48
WORKSPACE_PER_REQUEST_GIB = 0.10
GRAPH_BASE_GIB = 0.05
GRAPH_PER_SIZE_GIB = 0.04
GRAPH_PER_ROW_GIB = 0.003
DRAFT_GRAPH_SHARE = 0.9
PREFILL_GRAPH_BASE_GIB = 0.17
PREFILL_GRAPH_2048_GIB = 1.25
JIT_GIB = 0.42
JIT_DRAFT_GIB = 0.10
FRAGMENTATION_GIB = 0.12
FRAGMENTATION_PER_REQUEST_GIB = 0.03
ACTIVATION_GIB_PER_TOKEN = 0.19 / 1024
"""Eager prefill, for each prompt token in one pass."""
DRAFT_GRAPH_NEEDS_GIB = 1.0
"""SGLang's own threshold."""
HOST_GUARD_GIB = 8.0
"""Unified memory: below this the host's out-of-memory guard ends the scheduler."""
COMPILE_SPIKE_GIB = 0.9

# Acceptance of one drafted token, given that those before it were accepted. Instruction: accept length 4 to
# 5 on the write-up's machine; the others: public accept lengths and speeds by task (prose 2.2 to 2.8, math
# and code about 5).
ACCEPT_BY_TASK: Mapping[str, float] = MappingProxyType(
    {"instruction": 0.82, "math": 0.865, "code": 0.875, "prose": 0.64}
)
# Against DFlash2. DSpark: 152.14 tokens/s; MTP: accept length 2.9 with three drafts; n-gram: a guess below
# both.
ACCEPT_BY_METHOD: Mapping[str, float] = MappingProxyType(
    {"dflash": 1.0, "dspark": 0.854, "mtp": 0.975, "ngram": 0.45}
)
ACCEPT_DECAY_MTP = 0.985
"""Each further MTP step drafts from its own guess."""
ACCEPT_BEYOND_BLOCK = 0.86
"""Each position beyond the block that a draft was trained on: D=16 against 8 gives 3 % on an RTX 3090."""
ACCEPT_FP8_KV = 0.998
REQUEST_NOISE = 0.01
STEP_NOISE = 0.005

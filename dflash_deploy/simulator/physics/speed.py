"""How long a step takes: bytes over bandwidth, plus what launching and verifying cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_deploy.simulator import calibration as fitted
from dflash_deploy.simulator.physics.memory import slot_bytes

if TYPE_CHECKING:
    from dflash_deploy.simulator.calibration import CardCalibration
    from dflash_deploy.simulator.physics.residuals import Residuals
    from dflash_deploy.simulator.settings import Settings


@dataclass(frozen=True)
class Speed:
    """Times of one server. Everything that does not change from step to step is worked out once.

    Attributes:
        captured: decode batch sizes with graphs; empty where all runs eager.
        draft_graph: the draft has its graphs too.
    """

    weights_s: float
    step_s: float
    row_s: float
    draft_s: float
    state_s: float
    verify_state_s: float
    context_s_per_token: float
    draft_context_s_per_token: float
    draft_window: int | None
    rows_per_request: int
    captured: tuple[int, ...]
    draft_graph: bool
    slow_rows: bool
    compile_factor: float
    eager_s: float
    eager_draft_s: float
    prefill_tokens_per_s: float
    prefill_pass_s: float
    prefill_eager_s: float
    prefill_captured: int
    pair_s: float

    def decode_s(self, contexts: Sequence[int]) -> float:
        """One decode or verify step of the requests whose context lengths are given."""
        running = len(contexts)
        padded = next((size for size in self.captured if size >= running), None)
        batch = running if padded is None else padded
        rows = batch * self.rows_per_request
        target = self.weights_s + self.step_s + sum(contexts) * self.context_s_per_token
        # Rows that only pad a graph cost their computing, not their state.
        target += running * (self.state_s + self.verify_state_s) + (rows - 1) * self.row_s
        if self.slow_rows and rows not in fitted.FAST_ROWS:
            target += fitted.SLOW_ROWS_MS / 1000
        target *= self.compile_factor
        if padded is None:
            target = max(target, self.eager_s)
        if self.draft_s == 0.0:
            return target
        window = self.draft_window
        read = sum(contexts) if window is None else sum(min(length, window) for length in contexts)
        draft = self.draft_s + read * self.draft_context_s_per_token
        if padded is None or not self.draft_graph:
            draft = max(draft, self.eager_draft_s)
        return target + draft

    def prefill_s(self, tokens: int, context: int) -> float:
        """One prompt pass over ``tokens`` new tokens behind ``context`` earlier ones."""
        graph = 0 < tokens <= self.prefill_captured
        fixed = self.prefill_pass_s if graph else self.prefill_eager_s
        compute = tokens / self.prefill_tokens_per_s + tokens * (context + tokens / 2) * self.pair_s
        return max(fixed, self.weights_s) + compute


def speed_of(
    settings: Settings,
    card: CardCalibration,
    residuals: Residuals,
    *,
    captured: tuple[int, ...],
    draft_graph: bool,
    prefill_captured: int,
) -> Speed:
    """Times of a server that came up with these graphs."""
    bandwidth = settings.card.bandwidth_gb_per_s * 1e9 * fitted.BANDWIDTH_SHARE * residuals.bandwidth
    share = card.weight_speed.get(settings.target.quantization, 1.0)
    conv, ssm = slot_bytes(settings)
    speculation = settings.speculation
    rows = speculation.draft_tokens if speculation else 1
    kv = settings.target.kv_elements_per_token() * settings.kv_bytes / bandwidth
    if settings.attention_backend == "triton":
        kv *= 1.5
    draft, draft_kv = _draft(settings, card, bandwidth, residuals)
    verify_state = 0.0
    if speculation is not None:
        verify_state = conv / bandwidth if settings.replay_state else rows * ssm / bandwidth
    rate = card.prefill_tokens_per_s * residuals.prefill
    return Speed(
        weights_s=settings.target.read_bytes_per_token / (bandwidth * share),
        step_s=card.step_ms
        / 1000
        * residuals.launch
        * (fitted.TRITON_ATTENTION if settings.attention_backend == "triton" else 1.0),
        row_s=card.row_ms / 1000 * residuals.verify,
        draft_s=draft,
        state_s=2 * (conv + ssm) / bandwidth,
        verify_state_s=verify_state * residuals.verify,
        context_s_per_token=kv,
        draft_context_s_per_token=draft_kv,
        draft_window=speculation.window if speculation else None,
        rows_per_request=rows,
        captured=captured,
        draft_graph=draft_graph,
        slow_rows=settings.card.compute_capability == (12, 0) and settings.target.quantization == "nvfp4",
        compile_factor=1.0
        if not settings.torch_compile
        else fitted.COMPILE_VERIFY
        if speculation
        else fitted.COMPILE_PLAIN,
        eager_s=(fitted.EAGER_VERIFY_MS if speculation else fitted.EAGER_TARGET_MS) / 1000 * residuals.launch,
        eager_draft_s=fitted.EAGER_DRAFT_MS / 1000 * residuals.launch,
        prefill_tokens_per_s=rate,
        prefill_pass_s=fitted.PREFILL_GRAPH_MS / 1000 * residuals.launch,
        prefill_eager_s=fitted.PREFILL_EAGER_MS / 1000 * residuals.launch,
        prefill_captured=prefill_captured,
        pair_s=fitted.ATTENTION_S_PER_PAIR * 7000 / rate,
    )


def _draft(
    settings: Settings, card: CardCalibration, bandwidth: float, residuals: Residuals
) -> tuple[float, float]:
    """Time to draft one block, and for each token of context that drafting reads."""
    speculation = settings.speculation
    if speculation is None:
        return 0.0, 0.0
    if speculation.draft is None:
        return fitted.NGRAM_LOOKUP_MS / 1000, 0.0
    draft = speculation.draft
    one = (draft.read_bytes_per_token + settings.target.lm_head_bytes) / bandwidth
    kv = draft.kv_elements_per_token() * speculation.draft_kv_bytes / bandwidth
    if speculation.method == "mtp":
        step = one + fitted.MTP_STEP_MS / 1000
        return speculation.steps * step * residuals.verify, speculation.steps * kv
    fixed = card.draft_ms / 1000 * residuals.launch
    wider = max(0, speculation.draft_tokens - speculation.block_size) * card.row_ms / 1000
    return (one + fixed + wider) * residuals.verify, kv

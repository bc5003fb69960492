"""A start from command line to ready, as things said and time passed: no clock and no output here."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_deploy.simulator import calibration as fitted
from dflash_deploy.simulator import logs
from dflash_deploy.simulator.physics import memory
from dflash_deploy.simulator.physics.speed import Speed, speed_of

if TYPE_CHECKING:
    from dflash_deploy.simulator.calibration import CardCalibration
    from dflash_deploy.simulator.physics.memory import GraphMemory, Pools
    from dflash_deploy.simulator.physics.residuals import Residuals
    from dflash_deploy.simulator.settings import Settings

_POOL_ROUNDING_GIB = 0.03
_BLACKWELL = (10, 0)


@dataclass(frozen=True)
class Enter:
    """A stage begins (``faults.STAGES``)."""

    stage: str


@dataclass(frozen=True)
class Pass:
    """Simulated seconds go by."""

    seconds: float


@dataclass(frozen=True)
class Say:
    """A log line; ``raw`` ones have no time in front."""

    text: str
    raw: bool = False


BootEvent = Enter | Pass | Say


class SchedulerDiedError(Exception):
    """The scheduler process dies; the main process follows with SIGKILL.

    Attributes:
        stage: where (``faults.STAGES``, or ``serving``).
        kind: the Python exception it dies of; empty where it is killed from outside.
        exit_code: of the scheduler.
    """

    def __init__(self, stage: str, kind: str, message: str, exit_code: int = -9) -> None:
        super().__init__(message)
        self.stage = stage
        self.kind = kind
        self.message = message
        self.exit_code = exit_code


@dataclass(frozen=True)
class Up:
    """A server that came up.

    Attributes:
        free_gib: free memory when it was ready, before the first tokens went through.
        timings_s: seconds by phase, as SGLang sums them up.
    """

    settings: Settings
    residuals: Residuals
    pools: Pools
    speed: Speed
    free_gib: float
    weights_gib: float
    prefill_graph_gib: float
    verify_graph: GraphMemory
    draft_graph: GraphMemory
    timings_s: dict[str, float]

    @property
    def draft_graph_lost(self) -> bool:
        """Graphs were wanted and the draft got none."""
        speculation = self.settings.speculation
        return bool(
            speculation and speculation.draft and self.verify_graph.sizes and not self.draft_graph.sizes
        )


def start(settings: Settings, card: CardCalibration, residuals: Residuals) -> Generator[BootEvent, None, Up]:
    """Start a server.

    Raises:
        SchedulerDiedError: it does not come up.
    """
    run = _Start(settings, card, residuals)
    yield from run.load()
    pools = yield from run.pools()
    prefill = yield from run.prefill_graphs()
    verify, draft = yield from run.decode_graphs(pools)
    yield from run.finish(pools)
    speed = speed_of(
        settings,
        card,
        residuals,
        captured=verify.sizes,
        draft_graph=bool(draft.sizes),
        prefill_captured=max(prefill.sizes, default=0),
    )
    return Up(
        settings=settings,
        residuals=residuals,
        pools=pools,
        speed=speed,
        free_gib=run.free,
        weights_gib=memory.weights(settings),
        prefill_graph_gib=prefill.gib,
        verify_graph=verify,
        draft_graph=draft,
        timings_s=run.timings,
    )


class _Start:
    """One start on its way: how much is free, how long each phase took."""

    def __init__(self, settings: Settings, card: CardCalibration, residuals: Residuals) -> None:
        self.settings = settings
        self.residuals = residuals
        self.slow = card.boot_factor
        self.free = memory.free_before_load(settings, card, residuals)
        self.free_at_start = self.free
        self.elapsed = 0.0
        self.timings = {
            "load_weight": 0.0,
            "kv_cache_allocation": 0.0,
            "prefill": 0.0,
            "decode": 0.0,
            "target_verify": 0.0,
            "draft_decode": 0.0,
        }

    def _pass(self, seconds: float) -> Pass:
        self.elapsed += seconds
        return Pass(seconds)

    def _take(self, stage: str, gib: float, piece: float | None = None) -> None:
        """Allocate, or die as PyTorch does."""
        if gib > self.free:
            wanted = min(gib, piece or gib)
            raise SchedulerDiedError(
                stage,
                "torch.OutOfMemoryError",
                logs.out_of_memory(
                    self.settings.card.memory_mib, wanted=wanted, free=min(self.free, wanted * 0.8)
                ),
            )
        self.free -= gib

    def load(self) -> Iterator[BootEvent]:
        settings = self.settings
        baseline = 0.12
        if settings.release >= (0, 5, 21):
            yield Say("Init parallel begin.")
            yield self._pass(0.4)
            yield Say("Init parallel ends. elapsed=0.40 s")
            yield Say(f"Memory baseline taken. mem usage={baseline:.2f} GB")
        else:
            yield Say("Init torch distributed begin.")
            yield self._pass(0.4)
            yield Say(f"Init torch distributed ends. elapsed=0.40 s, mem usage={baseline:.2f} GB")
        yield Say(f"Load weight begin. avail mem={self.free:.2f} GB")
        yield Enter("load")
        self._supported()
        size = memory.weights(settings)
        seconds = 7.1 * size / 19.7 * self.slow
        yield self._pass(seconds)
        self._take("load", size, 0.17)
        self.timings["load_weight"] += seconds
        quant = {
            "nvfp4": "quant=modelopt_mixed, quant_algo=MIXED_PRECISION",
            "fp8": "quant=fp8, fmt=e4m3",
            "awq": "quant=awq_marlin, bits=4",
            "w4a16": "quant=compressed-tensors",
        }.get(settings.target.quantization, "")
        yield Say(
            logs.load_end(
                elapsed_s=seconds,
                architecture=settings.target.architecture,
                quant=quant,
                free=self.free,
                used=size,
            )
        )
        yield from self._load_draft()

    def _load_draft(self) -> Iterator[BootEvent]:
        speculation = self.settings.speculation
        if speculation is None or speculation.draft is None:
            return
        draft = speculation.draft
        yield Say(f"Load weight begin. avail mem={self.free:.2f} GB")
        yield Enter("draft-load")
        if draft.architecture == "DFlash2DraftModel" and self.settings.release < (0, 5, 19):
            raise SchedulerDiedError(
                "draft-load",
                "ValueError",
                f"Model architectures ['{draft.architecture}'] are not supported for now. Supported "
                "architectures: "
                "dict_keys(['DFlashDraftModel', 'DSparkDraftModel', 'Qwen3_5ForConditionalGeneration', …])",
            )
        seconds = 0.4 * self.slow * max(1.0, draft.loaded_gib / 3.7)
        yield self._pass(seconds)
        self._take("draft-load", draft.loaded_gib, 0.1)
        self.timings["load_weight"] += seconds
        yield Say(
            logs.load_end(
                elapsed_s=seconds,
                architecture=draft.architecture,
                quant="",
                free=self.free,
                used=draft.loaded_gib,
            )
        )
        if speculation.method == "dflash":
            window = speculation.window
            if speculation.draft_tokens != speculation.block_size:
                yield Say(
                    "DFLASH block size mismatch: using speculative_num_draft_tokens="
                    f"{speculation.draft_tokens} but draft config block_size={speculation.block_size}."
                )
            yield Say(
                f"Initialized DFLASH draft runner. attention_backend={self.settings.attention_backend}, "
                f"model={draft.architecture}, block_size={speculation.draft_tokens}, "
                f"draft_window_size={window}, compact_cache={window is not None}"
            )
            noise = ", noise_embed_scale=1.0" if self.settings.release >= (0, 5, 18) else ""
            yield Say(
                "DFLASH draft runner ready. mask_token=<|MASK|>, mask_token_id=248070, "
                f"mask_token_id_override=248070{noise}"
            )

    def _supported(self) -> None:
        capability = self.settings.card.compute_capability
        if self.settings.target.quantization == "nvfp4" and capability < _BLACKWELL:
            number = capability[0] * 10 + capability[1]
            raise SchedulerDiedError(
                "load",
                "ValueError",
                "The quantization method modelopt_mixed is not supported for the current GPU. "
                f"Minimum capability: 100. Current capability: {number}.",
            )

    def pools(self) -> Generator[BootEvent, None, Pools]:
        settings = self.settings
        yield Enter("sizing")
        reserve = memory.mm_reserve(settings)
        if reserve and settings.release >= (0, 5, 18):
            yield Say(
                f"Reserving {reserve:.2f} GB of the KV budget for post-sizing multimodal allocations "
                "(feature-transport pools + embedding cache)."
            )
        try:
            pools = memory.size_pools(settings, free_at_start=self.free_at_start, free=self.free)
        except memory.SizingError as failure:
            raise SchedulerDiedError("sizing", failure.kind, failure.message) from None
        for warning in pools.warnings:
            yield Say(warning)
        yield Enter("pools")
        seconds = 0.73 * min(self.slow, 2.0)
        yield self._pass(seconds)
        self.timings["kv_cache_allocation"] = seconds
        speculative = settings.speculation is not None
        if pools.slots:
            self._take("pools", pools.state, pools.ssm)
            yield Say(logs.state_cache(pools, speculative))
        self._take("pools", pools.kv + _POOL_ROUNDING_GIB, pools.kv / 32)
        yield Say(logs.kv_pool(settings.kv_cache_dtype, pools.tokens, pools.kv))
        yield Say(f"Memory pool end. avail mem={self.free:.2f} GB")
        if pools.draft_kv:
            self._take("pools", pools.draft_kv, pools.draft_kv / 10)
            draft_bytes = settings.speculation.draft_kv_bytes if settings.speculation else 2.0
            dtype = settings.kv_cache_dtype if draft_bytes < 2 else "bfloat16"
            yield Say(logs.kv_pool(dtype, pools.draft_tokens, pools.draft_kv))
            yield Say(f"Memory pool end. avail mem={self.free:.2f} GB")
        yield Say("Linear attention kernel backend: decode=triton, prefill=triton, verify=triton")
        yield Say("Using hybrid linear attention backend for hybrid GDN models.")
        yield self._pass(5.0 * self.slow)
        self._take("pools", memory.workspace(pools, self.residuals), 0.38)
        yield Say("FlashInfer autotune completed.")
        return pools

    def prefill_graphs(self) -> Generator[BootEvent, None, GraphMemory]:
        settings = self.settings
        graphs = memory.prefill_graphs(settings, self.residuals)
        if not graphs.sizes:
            if not settings.prefill_graphs:
                yield Say("Disable prefill CUDA graph because it is disabled by the server arguments.")
            return graphs
        yield Say(
            logs.capture_begin(settings, role="target", what="prefill", sizes=graphs.sizes, free=self.free)
        )
        yield Enter("prefill-capture")
        if graphs.gib > self.free:
            cause = logs.out_of_memory(settings.card.memory_mib, wanted=0.25, free=min(self.free, 0.2))
            yield from self._capture("prefill", graphs.sizes[::-1], 0.28, stop_at=1)
            raise SchedulerDiedError(
                "prefill-capture",
                "RuntimeError",
                logs.prefill_capture_failed(f"CUDA out of memory. {cause[20:]}"),
            )
        before = self.elapsed
        yield from self._capture("prefill", graphs.sizes[::-1], 0.28, gib=graphs.gib)
        self.free -= graphs.gib
        self.timings["prefill"] = self.elapsed - before
        yield Say(
            logs.capture_end(
                settings,
                role="target",
                what="prefill",
                sizes=graphs.sizes,
                elapsed_s=self.elapsed - before,
                used=graphs.gib,
                free=self.free,
            )
        )
        return graphs

    def decode_graphs(self, pools: Pools) -> Generator[BootEvent, None, tuple[GraphMemory, GraphMemory]]:
        settings = self.settings
        none = memory.GraphMemory((), 0.0)
        verify = memory.verify_graphs(settings, pools, self.residuals)
        speculation = settings.speculation
        what = "verify" if speculation else "decode"
        if not verify.sizes:
            return verify, none
        yield from self._capture_set("decode-capture", "target", what, verify)
        if speculation is None or speculation.draft is None:
            return verify, none
        if speculation.method == "dflash" and self.free < fitted.DRAFT_GRAPH_NEEDS_GIB:
            yield Say(
                f"Disable DFLASH draft cuda graph because only {self.free:.2f} GB GPU memory is available "
                "after "
                "target backend initialization."
            )
            return verify, none
        draft = memory.draft_graphs(verify)
        if speculation.method == "dflash" and settings.release >= (0, 5, 20):
            yield Say("DFLASH selector decode folded into the draft cuda graph (sampling_enabled=True).")
        elif speculation.method == "dflash":
            yield Say("DFLASH selector decode (greedy + sampling) folded into the draft cuda graph.")
        yield from self._capture_set(
            "draft-capture", "draft", "decode" if speculation.method == "mtp" else "verify", draft
        )
        return verify, draft

    def _capture_set(self, stage: str, role: str, what: str, graphs: GraphMemory) -> Iterator[BootEvent]:
        settings = self.settings
        yield Say(logs.capture_begin(settings, role=role, what=what, sizes=graphs.sizes, free=self.free))
        yield Enter(stage)
        each = (0.55 if role == "target" else 1.15) * min(self.slow, 6.0)
        if settings.torch_compile:
            each *= 6
        before = self.elapsed
        if graphs.gib > self.free:
            share = max(1, int(len(graphs.sizes) * max(self.free, 0) / graphs.gib))
            yield from self._capture("batches", graphs.sizes[::-1], each, stop_at=share, gib=self.free)
            cause = logs.out_of_memory(
                settings.card.memory_mib,
                wanted=graphs.gib / len(graphs.sizes),
                free=min(0.03, max(self.free, 0)),
            )
            raise SchedulerDiedError(stage, "Exception", logs.decode_capture_failed(cause))
        yield from self._capture("batches", graphs.sizes[::-1], each, gib=graphs.gib)
        self.free -= graphs.gib
        key = "draft_decode" if role == "draft" else "target_verify" if what == "verify" else "decode"
        self.timings[key] = self.elapsed - before
        yield Say(
            logs.capture_end(
                settings,
                role=role,
                what=what,
                sizes=graphs.sizes,
                elapsed_s=self.elapsed - before,
                used=graphs.gib,
                free=self.free,
            )
        )

    def _capture(
        self,
        what: str,
        sizes: tuple[int, ...],
        each_s: float,
        *,
        stop_at: int | None = None,
        gib: float = 0.0,
    ) -> Iterator[BootEvent]:
        """A progress bar over the sizes, largest first."""
        before = self.elapsed
        total = len(sizes)
        for done, size in enumerate(sizes):
            free = self.free - gib * done / total
            label = (
                f"Capturing prefill shape (num_tokens={size} avail_mem={free:.2f} GB)"
                if what == "prefill"
                else f"Capturing batches (bs={size} avail_mem={free:.2f} GB)"
            )
            yield Say(logs.progress(label, done, total, self.elapsed - before), raw=True)
            yield self._pass(each_s)
            if stop_at is not None and done + 1 >= stop_at:
                yield Say("\n", raw=True)
                return
        yield Say(logs.progress(label, total, total, self.elapsed - before), raw=True)

    def finish(self, pools: Pools) -> Iterator[BootEvent]:
        settings = self.settings
        if settings.card.unified_memory and self.free < fitted.HOST_GUARD_GIB:
            yield self._pass(2.0)
            raise SchedulerDiedError("decode-capture", "", "", exit_code=-15)
        yield Enter("warm-up")
        chunk = settings.chunked_prefill_size if settings.chunked_prefill_size > 0 else None
        yield Say(
            f"max_total_num_tokens={pools.tokens}, chunked_prefill_size={chunk}, "
            f"max_prefill_tokens={settings.max_prefill_tokens}, max_running_requests={pools.running}, "
            f"context_len={settings.context_length}, available_gpu_mem={self.free:.2f} GB"
        )
        yield self._pass(1.0)
        t = self.timings
        if settings.release >= (0, 5, 17):
            yield Say(
                f"Engine startup timings (s): load_weight={t['load_weight']:.2f}, "
                f"kv_cache_allocation={t['kv_cache_allocation']:.2f}, scheduler_e2e={self.elapsed + 9:.2f}, "
                f"cuda_graph={{prefill={t['prefill']:.2f}, decode={t['decode']:.2f}, "
                f"target_verify={t['target_verify']:.2f}, draft_prefill=0.00, "
                f"draft_decode={t['draft_decode']:.2f}, "
                f"draft_extend=0.00}}, tokenizer_e2e={self.elapsed + 14:.2f}"
            )
        t["scheduler_e2e"] = self.elapsed + 9
        t["tokenizer_e2e"] = self.elapsed + 14

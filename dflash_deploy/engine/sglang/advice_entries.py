"""The table of advice: flags that do nothing, hurt, or keep a server from starting.

Every entry is a condition over one configuration, with the evidence for it. Nothing is computed here that the
budget computes better.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dflash_deploy.engine.boot import Stage
from dflash_deploy.engine.launch import FlagValue
from dflash_deploy.engine.sglang.advice_case import Advice, Case, Row, Weight

_SIZE = re.compile(r"\d+(?:\.\d+)?[kMGT]")
_SIZE_FLAGS = frozenset({"max-total-tokens", "context-length", "max-prefill-tokens"})
_OWN_SHAPE = frozenset({"DFLASH", "DSPARK"})

Words = str | Callable[[Case], str]
Change = Mapping[str, FlagValue | None] | Callable[[Case], Mapping[str, FlagValue | None]]


@dataclass(frozen=True)
class Entry(Row[Case]):
    """One row of this table: what it costs, where it is known from, and the flags that help."""

    cost: Words
    evidence: str
    flags: Change = field(default_factory=dict)
    stage: Stage = Stage.ARGUMENTS

    def advice(self, case: Case) -> Advice:
        """What it says of a configuration."""
        return Advice(
            id=self.id,
            text=self.words(case),
            flags=self.flags(case) if callable(self.flags) else self.flags,
            cost=self.cost if isinstance(self.cost, str) else self.cost(case),
            evidence=self.evidence,
            weight=self.weight,
            stage=self.stage if self.weight is Weight.REFUSED else None,
        )


def _default_list(case: Case) -> bool:
    """Sizes of decode graphs are left to the engine, on a card where they matter."""
    said = case.given("cuda-graph-max-bs-decode") or case.given("cuda-graph-bs-decode")
    return case.small_card and case.decode_graphs and not said and case.wanted <= 8


def _list_follows(case: Case) -> bool:
    return case.release.decode_bs_follows_requests and case.given("max-running-requests")


def _capture_words(case: Case) -> str:
    largest, requests = case.default_batch or 0, case.requests
    if requests is not None and requests < largest:
        return (
            f"no --cuda-graph-max-bs-decode: memory is reserved for the default list, up to {largest} here, "
            f"before it is cut to {requests} running request{'s' if requests > 1 else ''}"
        )
    users = f"{case.users} user{'s' if case.users > 1 else ''}"
    return (
        f"no --cuda-graph-max-bs-decode: graphs are captured for batches up to {largest} on this card, "
        f"for {users}"
    )


def _sized_texts(case: Case) -> list[str]:
    found = []
    for at, word in enumerate(case.argv):
        name, equals, value = word.removeprefix("--").partition("=")
        following = value if equals else case.argv[at + 1] if at + 1 < len(case.argv) else ""
        if word.startswith("--") and name in _SIZE_FLAGS and _SIZE.fullmatch(following):
            found.append(f"--{name} {following}")
    return found


def _wrong_backend(case: Case) -> str | None:
    """Why the attention backend does not go with the card."""
    backends = {
        case.text(name)
        for name in ("attention-backend", "decode-attention-backend", "prefill-attention-backend")
    }
    major = case.architecture
    if major is None:
        return None
    if "fa3" in backends and major >= 10:
        return "fa3 runs on Ampere, Ada and Hopper only"
    if "trtllm_mha" in backends and major == 8:
        return "trtllm_mha runs on Hopper and Blackwell only"
    prefill = case.text("prefill-attention-backend") or case.text("attention-backend")
    kv_dtype = case.text("kv-cache-dtype")
    if prefill == "trtllm_mha" and major == 12 and kv_dtype == "fp8_e4m3":
        return "trtllm_mha has no prefill with an fp8_e4m3 cache on this card"
    return None


_FP8_GEMM_MAJORS = {
    "flashinfer_trtllm": (10,),
    "flashinfer_cutlass": (10, 12),
    "flashinfer_deepgemm": (9,),
    "deep_gemm": (9, 10),
    "cutlass": (12,),
}
"""Cards that each back end of block-FP8 products runs on, by compute capability."""

_FP4_GEMM_MAJORS = {
    "flashinfer_trtllm": (10,),
    "flashinfer_cutedsl": (10,),
    "flashinfer_cutlass": (10, 12),
    "flashinfer_cudnn": (10, 12),
}


def _wrong_gemm(case: Case, flag: str, majors: Mapping[str, tuple[int, ...]], word: str) -> bool:
    """The back end of a product that the checkpoint needs does not run on the card."""
    chosen = majors.get(case.text(flag))
    needed = word in case.model.path.casefold()
    return chosen is not None and needed and case.architecture is not None and case.architecture not in chosen


ENTRIES: tuple[Entry, ...] = (
    # The server would not start
    Entry(
        "slots-below-request",
        Weight.REFUSED,
        lambda c: bool(c.model.hybrid) and c.slots is not None and 0 < c.slots < c.slots_per_request,
        lambda c: (
            f"{c.slots} state slots are fewer than the {c.slots_per_request} that one request takes with "
            f"strategy {c.strategy}: SGLang refuses to start"
            + (
                " (so does the RTX 5090 write-up's own single-user setting on today's releases)"
                if c.slots == 4 and c.strategy == "auto"
                else ""
            )
        ),
        "extra_buffer_lazy takes 4 slots a request and no_buffer 3, at the price of coarser or no overlap "
        "of prefix snapshots; a slot of Qwen3.8 27B is 75 MiB with a bfloat16 state",
        "sizing code of the releases; message 'state cache is too small to serve any requests'",
        stage=Stage.SIZING,
        flags=lambda c: (
            {"mamba-radix-cache-strategy": "extra_buffer_lazy"}
            if (c.slots or 0) >= 4 and c.overlap
            else {"mamba-radix-cache-strategy": "no_buffer"}
            if (c.slots or 0) == 3
            else {"max-mamba-cache-size": c.slots_per_request}
        ),
    ),
    Entry(
        "dspark-block",
        Weight.REFUSED,
        lambda c: (
            c.algorithm == "DSPARK"
            and c.gamma is not None
            and c.given("speculative-num-draft-tokens")
            and c.whole("speculative-num-draft-tokens") != c.gamma + 1
        ),
        lambda c: (
            f"DSPARK wants --speculative-num-draft-tokens {(c.gamma or 0) + 1}: its block of {c.gamma} "
            "and the "
            f"token that the target adds, not {c.whole('speculative-num-draft-tokens')}"
        ),
        "none: it is the only value that starts",
        "argument check of the releases that have DSPARK",
        lambda c: {"speculative-num-draft-tokens": (c.gamma or 0) + 1},
    ),
    Entry(
        "replayssm-refused",
        Weight.REFUSED,
        lambda c: (
            c.on("enable-linear-replayssm-spec")
            and c.algorithm in _OWN_SHAPE
            and c.model.hybrid is not False
            and "kimi" not in c.model.path.casefold()
        ),
        lambda c: (
            f"--enable-linear-replayssm-spec with {c.algorithm} is refused on Qwen3.x; it helps EAGLE "
            "and NEXTN"
        ),
        "verify states stay in full: about 72 MiB a draft token and request with a bfloat16 state",
        "argument check, every release that has the flag (0.5.17 and newer)",
        {"enable-linear-replayssm-spec": None},
    ),
    Entry(
        "dflash2-needs-0-5-19",
        Weight.REFUSED,
        lambda c: c.algorithm == "DFLASH" and c.model.draft_dflash2 and not c.release.dflash2,
        lambda c: f"SGLang {c.version} does not know DFlash2 drafts: 0.5.19 is the first that does",
        "an upgrade",
        "model classes registered by each release",
        stage=Stage.DRAFT_LOAD,
    ),
    Entry(
        "dspark-needs-0-5-16",
        Weight.REFUSED,
        lambda c: c.algorithm == "DSPARK" and not c.release.dspark,
        lambda c: f"SGLang {c.version} does not know DSPARK: 0.5.16 is the first that does",
        "an upgrade",
        "algorithms of each release",
    ),
    Entry(
        "quantized-head",
        Weight.REFUSED,
        lambda c: (
            c.algorithm == "DFLASH"
            and c.quantized_head
            and not (
                c.release.quantized_head_dflash2
                if c.model.draft_dflash2
                else c.release.quantized_head_plain_dflash
            )
        ),
        lambda c: (
            f"the checkpoint's output head is {c.model.lm_head}, and DFLASH in SGLang {c.version} needs "
            "a dense one; "
            "--enable-fp32-lm-head does not make it dense"
        ),
        "SGLang 0.5.19 or newer, or an export with a bfloat16 head (about 3 GiB more)",
        "published reports: 'requires a dense FP16/BF16/FP32 target lm_head'; head support by release",
        stage=Stage.WARM_UP,
    ),
    Entry(
        "draft-missing",
        Weight.REFUSED,
        lambda c: c.algorithm in ("DFLASH", "STANDALONE") and not c.given("speculative-draft-model-path"),
        lambda c: f"{c.algorithm} needs --speculative-draft-model-path",
        "none: it does not start without",
        "argument check of every release",
    ),
    Entry(
        "draft-window",
        Weight.REFUSED,
        lambda c: (
            (c.whole("speculative-draft-window-size") or 1 << 30) < (c.draft_tokens or 0)
            and c.algorithm == "DFLASH"
        ),
        lambda c: (
            f"--speculative-draft-window-size {c.whole('speculative-draft-window-size')} is below the "
            f"{c.draft_tokens} draft tokens"
        ),
        "a larger window holds more of the draft's KV cache",
        "argument check: the window must hold a block",
        lambda c: {"speculative-draft-window-size": c.draft_tokens or 0},
    ),
    Entry(
        "track-interval",
        Weight.REFUSED,
        lambda c: (
            bool(c.model.hybrid)
            and c.radix
            and c.strategy != "no_buffer"
            and (c.whole("mamba-track-interval") or 256) < (c.draft_tokens or 0)
        ),
        lambda c: f"--mamba-track-interval must be at least the {c.draft_tokens} draft tokens",
        "coarser prefix snapshots",
        "argument check of every release",
        lambda c: {"mamba-track-interval": max(c.draft_tokens or 0, 256)},
    ),
    Entry(
        "lazy-needs-overlap",
        Weight.REFUSED,
        lambda c: bool(c.model.hybrid) and c.radix and c.strategy == "extra_buffer_lazy" and not c.overlap,
        "extra_buffer_lazy needs the overlap schedule, which --disable-overlap-schedule takes away",
        "none: overlap is the quicker way",
        "argument check of every release",
        {"disable-overlap-schedule": None},
    ),
    Entry(
        "strategy-without-state",
        Weight.REFUSED,
        lambda c: c.model.hybrid is False and c.strategy.startswith("extra_buffer"),
        lambda c: (
            f"--mamba-radix-cache-strategy {c.strategy} is for models with recurrent layers; this has none"
        ),
        "none",
        "published reports: a ValueError, in older releases 'NoneType object is not subscriptable'",
        {"mamba-radix-cache-strategy": None},
    ),
    Entry(
        "linear-backend-float32",
        Weight.REFUSED,
        lambda c: (
            bool(c.model.hybrid)
            and "flashinfer" in (c.text("linear-attn-decode-backend"), c.text("linear-attn-backend"))
            and (c.architecture or 0) >= 10
            and (c.text("mamba-ssm-dtype") or c.model.state_dtype or "float32") == "float32"
        ),
        "the flashinfer backend of linear attention needs a bfloat16 state on this card",
        "half the state's memory; published runs lost nothing by it",
        "published report: 'requires --mamba-ssm-dtype bfloat16'",
        {"mamba-ssm-dtype": "bfloat16"},
    ),
    Entry(
        "attention-backend",
        Weight.REFUSED,
        lambda c: _wrong_backend(c) is not None,
        lambda c: f"the attention backend does not go with this card: {_wrong_backend(c)}",
        "none: flashinfer is what SGLang takes here by itself",
        "argument check of the releases; published report of fa3 failing in capture",
        {
            "attention-backend": "flashinfer",
            "decode-attention-backend": None,
            "prefill-attention-backend": None,
        },
    ),
    Entry(
        "fp8-gemm-card",
        Weight.REFUSED,
        lambda c: _wrong_gemm(c, "fp8-gemm-backend", _FP8_GEMM_MAJORS, "fp8"),
        lambda c: (
            f"{c.text('fp8-gemm-backend')} has no FP8 products for this card: the checkpoint does not load so"
        ),
        "none: auto takes cutlass on an RTX 50 card and triton or DeepGEMM elsewhere",
        "dispatch of block-FP8 products in SGLang 0.5.16 to 0.5.23",
        {"fp8-gemm-backend": None},
        stage=Stage.LOAD,
    ),
    Entry(
        "fp4-gemm-card",
        Weight.WRONG,
        lambda c: _wrong_gemm(c, "fp4-gemm-backend", _FP4_GEMM_MAJORS, "nvfp4"),
        lambda c: (
            f"{c.text('fp4-gemm-backend')} has no FP4 products for this card: the first pass through the "
            "model ends the server"
        ),
        "none: auto takes flashinfer_cutlass on an RTX 50 card and Marlin on older ones",
        "choice of FP4 products in SGLang 0.5.23; the cards that FlashInfer's products name",
        {"fp4-gemm-backend": None},
    ),
    Entry(
        "nvfp4-card",
        Weight.SLOW,
        lambda c: c.architecture == 8 and "nvfp4" in c.model.path.casefold(),
        "an NVFP4 checkpoint is made for the FP4 cores of Blackwell, which this card lacks",
        "AWQ or W4A16 of the same model: about the same size",
        "published report of Ada and Ampere cards",
    ),
    Entry(
        "yarn-with-draft",
        Weight.REFUSED,
        lambda c: (
            c.algorithm in _OWN_SHAPE
            and any(word in c.text("json-model-override-args") for word in ("rope", "yarn"))
        ),
        (
            "--json-model-override-args with rope settings reaches the draft's configuration too, and "
            "loading it fails"
        ),
        "the context that the checkpoint has by itself",
        "published report: 'PreTrainedConfig object has no attribute max_position_embeddings'",
        {"json-model-override-args": None},
        Stage.DRAFT_LOAD,
    ),
    Entry(
        "dflash-pipeline",
        Weight.REFUSED,
        lambda c: c.algorithm in _OWN_SHAPE and (c.whole("pp-size") or 1) > 1,
        lambda c: f"{c.algorithm} runs without pipeline parallelism only",
        "use --tp-size for several cards",
        "argument check of every release",
        {"pp-size": None},
    ),
    # Wrong while serving
    Entry(
        "open-to-all",
        Weight.WRONG,
        lambda c: (
            c.text("host") in ("0.0.0.0", "::", "[::]")  # noqa: S104 -- compared, not bound
            and not c.given("api-key")
            and not c.given("config")
        ),
        lambda c: (
            f"--host {c.text('host')} without a key: everybody who reaches this machine can use the server"
        ),
        "a reverse proxy, or a key in a file that only the service reads (--config FILE)",
        "SGLang listens on 127.0.0.1 by itself",
        {"host": "127.0.0.1"},
    ),
    Entry(
        "key-in-command",
        Weight.WRONG,
        lambda c: c.given("api-key") or c.given("admin-api-key"),
        lambda c: (
            "a key in the command line is shown by ps to everybody on the machine, and SGLang prints it "
            "in its log" + (" and in /server_info" if c.since("0.5.20") else "")
        ),
        "put `api-key: …` in a 0600 YAML file and give it with --config",
        "start-up line server_args= of every release; launch_command from 0.5.20 on",
        {"api-key": None, "admin-api-key": None},
    ),
    Entry(
        "mixed-chunk",
        Weight.WRONG,
        lambda c: c.on("enable-mixed-chunk") and bool(c.model.hybrid) and c.algorithm not in _OWN_SHAPE,
        "--enable-mixed-chunk corrupts the recurrent state that the prefix cache keeps of this model",
        "accuracy 0.91 became 0.84 to 0.86, and the median answer took 3 to 7 s instead of 0.2 (published)",
        "public issue, still open",
        {"enable-mixed-chunk": None},
    ),
    Entry(
        "float16-conv",
        Weight.WRONG,
        lambda c: (
            bool(c.model.hybrid)
            and c.text("dtype") in ("float16", "half")
            and c.env.get("SGLANG_MAMBA_CONV_DTYPE") != "float16"
        ),
        "--dtype float16 with a bfloat16 convolution state fails at the first request",
        "SGLANG_MAMBA_CONV_DTYPE=float16, or --dtype bfloat16 where the checkpoint allows it",
        "published report: 'Index put requires the source and destination dtypes match'",
    ),
    Entry(
        "graphs-below-users",
        Weight.WRONG,
        lambda c: (
            bool(c.algorithm)
            and c.decode_graphs
            and not c.given("cuda-graph-bs-decode")
            and (c.whole("cuda-graph-max-bs-decode") or 1 << 30) < min(c.wanted, c.requests or 1 << 30)
        ),
        lambda c: (
            f"graphs up to a batch of {c.whole('cuda-graph-max-bs-decode')} and {c.wanted} requests at "
            "once: larger "
            "batches run without a graph, slowly, and in some builds end in an error"
        ),
        "about 0.35 GiB for each further verify size",
        "open upstream change: a running batch above the captured ones fails ('tensor a (4) … tensor b (8)')",
        lambda c: {"cuda-graph-max-bs-decode": c.wanted},
    ),
    Entry(
        "unified-fraction",
        Weight.WRONG,
        lambda c: c.unified and (c.number("mem-fraction-static") or 0) > 0.8,
        lambda c: (
            f"--mem-fraction-static {c.number('mem-fraction-static'):g} on unified memory: the host's "
            "guard ends the "
            "server without a word once less than about 8 GB are free"
        ),
        "0.80: 15 of 48 published configurations were lost at 0.85, none at 0.80",
        "published sweep on a DGX Spark",
        {"mem-fraction-static": 0.8},
    ),
    # Slow
    Entry(
        "decode-graph-off",
        Weight.SLOW,
        lambda c: not c.decode_graphs,
        lambda c: (
            "decode runs without CUDA graphs: "
            + (
                "about 3 times slower with speculation, which then gains nothing"
                if c.algorithm
                else "each step pays for every launch"
            )
        ),
        (
            "207.5 tokens/s became 63.9 on an RTX 5090 with DFlash2 (published); graphs take about 0.35 GiB "
            "a verify size"
        ),
        "published RTX 5090 write-up",
        lambda c: (
            {"disable-cuda-graph": None, "disable-prefill-cuda-graph": True}
            if c.on("disable-cuda-graph")
            else {"disable-decode-cuda-graph": None, "cuda-graph-backend-decode": None}
        ),
    ),
    Entry(
        "torch-compile",
        Weight.SLOW,
        lambda c: c.on("enable-torch-compile") and c.decode_graphs,
        "--enable-torch-compile beside decode graphs made decoding 6 times slower",
        "59.4 tokens/s became 10 on an RTX 5090 (published), and starts take minutes longer",
        "public issue, SGLang 0.5.17",
        {"enable-torch-compile": None},
    ),
    Entry(
        "radix-with-few-slots",
        Weight.SLOW,
        lambda c: (
            bool(c.model.hybrid)
            and c.radix
            and c.slots is not None
            and c.wanted > 1
            and c.served_by_slots < c.wanted <= c.slots
        ),
        lambda c: (
            f"with the radix cache on, {c.slots} state slots serve {c.served_by_slots} at once, not "
            f"{c.wanted} ({c.slots_per_request} slots a request); without it, one slot serves one request"
        ),
        "prompts that begin alike are computed anew each time",
        "sizing code of the releases; the published four-user setting has the cache off",
        {"disable-radix-cache": True, "mamba-radix-cache-strategy": None},
    ),
    Entry(
        "requests-capped-by-slots",
        Weight.SLOW,
        lambda c: (
            bool(c.model.hybrid)
            and c.slots is not None
            and c.slots >= c.slots_per_request
            and c.served_by_slots < c.wanted
            and (c.wanted > c.slots or not c.radix)
        ),
        lambda c: (
            f"{c.slots} state slots serve {c.served_by_slots} requests at once "
            f"({c.slots_per_request} each), not {c.wanted}; "
            + ("SGLang only logs it" if c.release.logs_request_clamp else "this release does not even say so")
        ),
        lambda c: (
            f"{c.slots_per_request * c.wanted - (c.slots or 0)} more slots, 75 MiB each with a bfloat16 "
            "state of "
            "Qwen3.8 27B"
        ),
        "sizing code of the releases; published log 'capped to 6 by the mamba state cache'",
        lambda c: {"max-mamba-cache-size": c.slots_per_request * c.wanted},
    ),
    Entry(
        "requests-below-users",
        Weight.SLOW,
        lambda c: (c.whole("max-running-requests") or 1 << 30) < c.users,
        lambda c: (
            f"--max-running-requests {c.whole('max-running-requests')}: of {c.users} users the others wait"
        ),
        "state slots, verify states and graphs for each further request",
        "scheduler: requests above the limit queue",
        lambda c: {"max-running-requests": c.users},
    ),
    Entry(
        "awq-on-ada",
        Weight.SLOW,
        lambda c: c.compute_capability == "8.9" and "awq" in c.model.path.casefold(),
        "AWQ on Ada cards: decode graphs hung and 6 tokens/s were left without them in SGLang 0.5.18",
        "W4A16 (compressed-tensors, Marlin) of the same model: about the same size",
        "public issue, RTX 4080 SUPER",
    ),
    # Memory
    Entry(
        "implicit-requests",
        Weight.MEMORY,
        lambda c: bool(c.algorithm) and not c.given("max-running-requests"),
        "no --max-running-requests: speculation makes it 48, with state, verify buffers and graphs to match",
        lambda c: f"more than {c.users} at once then wait",
        "argument resolution of every release",
        lambda c: {"max-running-requests": max(c.users, 1)},
    ),
    Entry(
        "default-capture-list",
        Weight.MEMORY,
        lambda c: _default_list(c) and not _list_follows(c),
        _capture_words,
        "larger batches then run without a graph; the whole list took about 5 GB on a 32 GB card (published)",
        "public issue, RTX 5090; default lists of the releases",
        lambda c: {"cuda-graph-max-bs-decode": c.wanted},
    ),
    Entry(
        "default-capture-list",
        Weight.NOTE,
        lambda c: _default_list(c) and _list_follows(c),
        lambda c: (
            f"no --cuda-graph-max-bs-decode: SGLang {c.version} follows --max-running-requests; releases "
            f"before 0.5.22 reserve memory for batches up to {c.default_batch}"
        ),
        "larger batches then run without a graph",
        "argument resolution of the releases",
        lambda c: {"cuda-graph-max-bs-decode": c.wanted},
    ),
    Entry(
        "default-fraction-fell",
        Weight.MEMORY,
        lambda c: c.small_card and c.since("0.5.20") and not c.given("mem-fraction-static"),
        "no --mem-fraction-static: its default on a 32 GB card fell from 0.874 to 0.777 with SGLang "
        "0.5.20 (0.808 to "
        "0.718 for a model that sees), about 3 GiB less for the pools",
        "less is left for graphs and activations: try the value with this plan first",
        "default computed by the releases' own functions",
        {"mem-fraction-static": 0.85},
    ),
    Entry(
        "fraction-too-high",
        Weight.MEMORY,
        lambda c: (
            c.small_card
            and not c.unified
            and (c.number("mem-fraction-static") or 0) >= 0.9
            and not c.given("max-total-tokens")
        ),
        lambda c: (
            f"--mem-fraction-static {c.number('mem-fraction-static'):g} without --max-total-tokens: the "
            "pools take all "
            "of it, and graphs, workspaces and large prompts must live in the rest"
        ),
        "fewer KV tokens, as many as are needed",
        "published RTX 5090 failures at 0.90 to 0.94; the published 0.95 setting caps its tokens at 8192",
        {"max-total-tokens": 16384},
    ),
    Entry(
        "state-float32",
        Weight.MEMORY,
        lambda c: (
            bool(c.model.hybrid)
            and (c.text("mamba-ssm-dtype") or c.model.state_dtype or "float32") == "float32"
            and "SGLANG_MAMBA_SSM_DTYPE" not in c.env
        ),
        (
            "the recurrent state is kept in float32: twice the memory of bfloat16 for each slot and each "
            "draft token"
        ),
        (
            "published runs with bfloat16 lost nothing; 72 MiB less for each slot and verify state of "
            "Qwen3.8 27B"
        ),
        "state arithmetic of the releases; the published settings use bfloat16",
        {"mamba-ssm-dtype": "bfloat16"},
    ),
    Entry(
        "prefill-graphs",
        Weight.MEMORY,
        lambda c: c.small_card and c.prefill_graphs and c.card_memory_mib is not None,
        "prefill graphs are on: they take over a gigabyte of a card of this size",
        "prompts start a little later; 1.42 GiB for 42 sizes, 1.25 of it for the largest (published logs)",
        "published boot logs and RTX 5090 settings",
        {"disable-prefill-cuda-graph": True},
    ),
    Entry(
        "chunk-too-large",
        Weight.MEMORY,
        lambda c: (
            c.small_card
            and c.given("chunked-prefill-size")
            and ((c.whole("chunked-prefill-size") or 0) <= 0 or (c.whole("chunked-prefill-size") or 0) > 4096)
        ),
        lambda c: (
            "chunked prefill is off: one long prompt takes as much memory as it is long"
            if (c.whole("chunked-prefill-size") or 0) <= 0
            else f"prompts go through {c.whole('chunked-prefill-size')} tokens at a time: each takes "
            "about 1.5 MiB of room for activations"
        ),
        "long prompts take more steps",
        "reserve that the default memory fraction sets aside by chunk size",
        {"chunked-prefill-size": 2048},
    ),
    Entry(
        "kv-bfloat16",
        Weight.MEMORY,
        lambda c: (
            c.text("kv-cache-dtype") in ("bf16", "bfloat16")
            and (c.model.kv_cache_dtype or "").startswith("fp8")
        ),
        "the checkpoint is made for an FP8 KV cache, and bfloat16 doubles its bytes a token",
        "compare answers before and after, if in doubt",
        "the checkpoint's own configuration",
        {"kv-cache-dtype": "fp8_e4m3"},
    ),
    Entry(
        "images-not-needed",
        Weight.MEMORY,
        lambda c: (
            c.model.vision
            and c.small_card
            and c.since("0.5.18")
            and not c.on("language-model-only")
            and not c.on("language-only")
        ),
        "the model's vision part is loaded, and memory reserved for images",
        "images are refused then",
        (
            "default memory fraction of the releases (0.925 of it for a model that sees) and the reserve in "
            "their logs"
        ),
        {"language-model-only": True},
    ),
    Entry(
        "language-only",
        Weight.MEMORY,
        lambda c: c.on("language-only") and c.since("0.5.18"),
        "--language-only belongs to serving image encoders apart; --language-model-only serves text alone",
        "none for a service of text",
        "flags of 0.5.18 and newer",
        {"language-only": None, "language-model-only": True},
    ),
    Entry(
        "image-transport",
        Weight.MEMORY,
        lambda c: c.model.vision and c.text("mm-feature-transport") in ("cuda_ipc", "cuda_vmm"),
        lambda c: (
            f"--mm-feature-transport {c.text('mm-feature-transport')} takes 1 GiB of the card for images"
        ),
        "a copy through the host's memory for each image",
        "reserve of the releases from 0.5.18 on",
        {"mm-feature-transport": "cpu"},
    ),
    Entry(
        "segments",
        Weight.MEMORY,
        lambda c: (
            c.small_card
            and (c.number("mem-fraction-static") or 0) >= 0.88
            and "expandable_segments" not in c.env.get("PYTORCH_CUDA_ALLOC_CONF", "")
            and "expandable_segments" not in c.env.get("PYTORCH_ALLOC_CONF", "")
        ),
        "with so little left free, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in its environment",
        "none known",
        "published RTX 5090 failure with 487 MiB reserved but unallocated, gone with it",
    ),
    Entry(
        "uncapped-unified",
        Weight.MEMORY,
        lambda c: c.unified and not c.given("max-total-tokens"),
        "no --max-total-tokens on unified memory: the KV pool takes what the host needs",
        "fewer KV tokens, as many as are needed",
        "published run on a DGX Spark: 744,276 tokens, 36.9 GiB",
        {"max-total-tokens": 200000},
    ),
    # Does nothing
    Entry(
        "fp32-head",
        Weight.NOTHING,
        lambda c: c.on("enable-fp32-lm-head") and c.quantized_head,
        lambda c: (
            f"--enable-fp32-lm-head does not make the {c.model.lm_head} head dense: a quantised head stays so"
        ),
        "none to leave it out",
        "logits code of the releases; published reports of DFlash2",
        {"enable-fp32-lm-head": None},
    ),
    Entry(
        "steps-ignored",
        Weight.NOTHING,
        lambda c: (
            c.algorithm in _OWN_SHAPE
            and ((c.whole("speculative-num-steps") or 1) > 1 or (c.whole("speculative-eagle-topk") or 1) > 1)
        ),
        lambda c: (
            f"{c.algorithm} drafts a block at once: --speculative-num-steps and "
            "--speculative-eagle-topk are set to 1"
        ),
        "none to leave them out",
        "argument resolution of every release",
        {"speculative-num-steps": None, "speculative-eagle-topk": None},
    ),
    Entry(
        "mixed-chunk-off",
        Weight.NOTHING,
        lambda c: c.on("enable-mixed-chunk") and c.algorithm in _OWN_SHAPE,
        lambda c: f"--enable-mixed-chunk is switched off by {c.algorithm}",
        "none to leave it out",
        "argument resolution of the releases",
        {"enable-mixed-chunk": None},
    ),
    Entry(
        "ratio-ignored",
        Weight.NOTHING,
        lambda c: (
            bool(c.model.hybrid)
            and c.given("mamba-full-memory-ratio")
            and (c.slots is not None or (not c.radix and c.given("max-running-requests")))
        ),
        "--mamba-full-memory-ratio does nothing where the number of state slots is given, or follows "
        "from the "
        "requests",
        "none to leave it out",
        "sizing code of the releases",
        {"mamba-full-memory-ratio": None},
    ),
    Entry(
        "strategy-ignored",
        Weight.NOTHING,
        lambda c: bool(c.model.hybrid) and not c.radix and c.given("mamba-radix-cache-strategy"),
        "--mamba-radix-cache-strategy does nothing with --disable-radix-cache: a request takes one slot",
        "none to leave it out",
        "sizing code of the releases",
        {"mamba-radix-cache-strategy": None},
    ),
    Entry(
        "compile-size-ignored",
        Weight.NOTHING,
        lambda c: c.given("torch-compile-max-bs") and not c.on("enable-torch-compile"),
        "--torch-compile-max-bs does nothing without --enable-torch-compile, which is better left out too",
        "none to leave it out",
        "flags of the releases; seen in published settings",
        {"torch-compile-max-bs": None},
    ),
    Entry(
        "graph-size-ignored",
        Weight.NOTHING,
        lambda c: (
            c.given("cuda-graph-max-bs-decode") and (c.given("cuda-graph-bs-decode") or not c.decode_graphs)
        ),
        lambda c: (
            "--cuda-graph-max-bs-decode does nothing "
            + ("beside --cuda-graph-bs-decode" if c.decode_graphs else "without decode graphs")
        ),
        "none to leave it out",
        "argument resolution of the releases",
        {"cuda-graph-max-bs-decode": None},
    ),
    Entry(
        "draft-without-algorithm",
        Weight.NOTHING,
        lambda c: (
            not c.algorithm
            and (c.given("speculative-draft-model-path") or c.given("speculative-num-draft-tokens"))
        ),
        "speculative flags without --speculative-algorithm: nothing is drafted",
        "the draft's weights and state for each draft token",
        "argument resolution of the releases",
        lambda c: {"speculative-algorithm": "DFLASH"} if c.model.draft_dflash2 else {},
    ),
    # Worth knowing
    Entry(
        "block-differs",
        Weight.NOTE,
        lambda c: (
            c.algorithm == "DFLASH"
            and c.model.draft_block is not None
            and c.given("speculative-num-draft-tokens")
            and c.draft_tokens != c.model.draft_block
        ),
        lambda c: (
            f"{c.draft_tokens} draft tokens with a draft trained for {c.model.draft_block}: it works, "
            "and SGLang warns; "
            + (
                "more than that are checked for little"
                if (c.draft_tokens or 0) > (c.model.draft_block or 0)
                else "fewer cost less where few are accepted"
            )
        ),
        "tune it: 8 for instructions and code, 6 for a mix, 4 for free prose are good starting points",
        "log line 'DFLASH block size mismatch'; published settings from 4 to 9",
        lambda c: {"speculative-num-draft-tokens": c.model.draft_block or 8},
    ),
    Entry(
        "disable-cuda-graph-old",
        Weight.NOTE,
        lambda c: c.on("disable-cuda-graph"),
        "--disable-cuda-graph is an old name that takes both kinds of graphs away; only the prefill "
        "graphs cost "
        "much memory",
        "works for now",
        "deprecated in every release known",
        {"disable-cuda-graph": None, "disable-prefill-cuda-graph": True},
    ),
    Entry(
        "thousands",
        Weight.NOTE,
        lambda c: bool(_sized_texts(c)),
        lambda c: (
            f"{', '.join(_sized_texts(c))}: k is 1000 and Ki 1024, so that 8k is 8000 tokens and 8Ki 8192"
        ),
        "none",
        "SGLang's own reader of such numbers",
    ),
    Entry(
        "kv-by-checkpoint",
        Weight.NOTE,
        lambda c: (
            c.text("kv-cache-dtype") in ("", "auto") and (c.model.kv_cache_dtype or "").startswith("fp8")
        ),
        lambda c: (
            f"no --kv-cache-dtype: the checkpoint asks for {c.model.kv_cache_dtype}, and SGLang follows it"
        ),
        "none",
        "published logs: auto became fp8_e4m3",
    ),
    Entry(
        "draft-cache-fa4",
        Weight.NOTE,
        lambda c: (
            c.text("speculative-draft-attention-backend") == "fa4"
            and c.text("kv-cache-dtype").startswith("fp8")
        ),
        "the fa4 backend keeps the draft's KV cache in bfloat16: twice the bytes a token",
        "flashinfer reads an FP8 one",
        "sizing code of the releases",
        {"speculative-draft-attention-backend": "flashinfer"},
    ),
)
"""All that is known, in no order; ``advise`` sorts by weight."""

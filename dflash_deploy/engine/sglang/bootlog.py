"""The log of a starting SGLang, read into a boot record (every release from 0.5.12 on; "GB" there is GiB)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from dflash_deploy.engine.boot import (
    BootRecord,
    Degradation,
    GraphCapture,
    KvPool,
    LoadedWeights,
    Stage,
    StateCache,
)
from dflash_deploy.engine.sglang.bootfailure import FailureReader
from dflash_deploy.engine.sglang.logline import LogLine, log_lines

_NUMBER = r"(-?\d{1,12}(?:\.\d{1,9})?)"
_DEGRADATIONS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(text))
    for name, text in (
        ("draft-graph-lost", r"Disable \w{1,20} draft cuda graph because"),
        ("requests-clamped", r"max_running_requests is capped to \d"),
        ("requests-clamped", r"max_running_requests was reduced from the requested \d"),
        ("tokens-clamped", r"max_total_tokens=\d{1,15} is larger than the profiled value"),
        ("prefill-graph-disabled", r"Disable prefill CUDA graph"),
        ("block-size-mismatch", r"block size mismatch: using speculative_num_draft_tokens"),
        ("non-greedy-unavailable", r"non-greedy verification is unavailable"),
        ("selector-torch-fallback", r"flashinfer is unavailable; the DFlash2 selector falls back"),
        ("draft-head-eager", r"DFLASH draft greedy head kept eager|DSpark draft proposal kept eager"),
    )
)
_MARKS = re.compile(
    r"server_args=|Load weight|Reserving |is allocated|VA upper bound|KV cache allocated|Memory pool end"
    r"|graph|max_total_num_tokens=|startup timings|fired up|Capturing |oading "
)
_SECRET = re.compile(r"""['"]?(?:admin_)?api_key['"]?\s*[=:]\s*(['"])(?P<secret>.{1,4000}?)\1""")
_SECRET_FLAG = re.compile(r"--(?:admin-)?api-key[= ]\S{1,4000}")
_CAPTURE = re.compile(
    r"Capture (?P<label>[\w ()-]{0,40}?) ?(?:CUDA|cuda|cpu|npu) graph (?P<edge>begin|end)\b"
)
_BAR = re.compile(r"(?P<what>Capturing|[Ll]oading) .{0,120}?\b(?P<done>\d{1,6})/(?P<all>\d{1,6}) \[")
_SIZES = re.compile(r"\b(?:bs|num_tokens)=\[(?P<sizes>[\d, ]{0,20000})\]")
_DTYPE = re.compile(r"dtype: (?:torch\.)?(\w{1,40})")
_TYPE = re.compile(r"\btype=(\w{1,100})")
_TIMING = re.compile(r"(\w{1,60})=(?:(\d{1,9}(?:\.\d{1,9})?)|\{([^{}]{0,2000})\})")
_VERSION = re.compile(
    r"""(?:\bsglang[_ ]version|['"]version['"])\s*[=:]\s*['"]?v?(\d[\w.+]{2,60})""", re.IGNORECASE
)
_NOT_ASKED = "Max running requests is reset to "
_ARGUMENTS = (
    "device",
    "max_running_requests",
    "dp_size",
    "speculative_draft_model_path",
    "disable_prefill_cuda_graph",
    "disable_cuda_graph",
    "cuda_graph_backend_prefill",
)
_ARGUMENT_VALUE = r"""['"]?\s?[=:]\s?(?:(['"])(?P<text>.{0,400}?)\1|(?P<word>[\w.-]{1,40}))"""
_STAGE_WORDS: Mapping[Stage, str] = {
    Stage.ARGUMENTS: "reading arguments",
    Stage.IMPORTS: "starting processes",
    Stage.LOAD: "loading weights",
    Stage.DRAFT_LOAD: "loading draft weights",
    Stage.SIZING: "sizing memory",
    Stage.POOLS: "allocating pools",
    Stage.PREFILL_CAPTURE: "capturing prefill graphs",
    Stage.DECODE_CAPTURE: "capturing graphs",
    Stage.DRAFT_CAPTURE: "capturing draft graphs",
    Stage.WARM_UP: "warming up",
    Stage.SERVING: "serving",
}


@dataclass(frozen=True)
class Progress:
    """Where a start stands, and what is being done there, in words."""

    stage: Stage
    detail: str


class BootLog:
    """Reads the log of one start, line by line; never raises, whatever the text.

    A log that holds several starts (the journal of a service) gives the last one.
    """

    def __init__(self) -> None:
        self._secrets: set[str] = set()
        self._reset()

    def _reset(self) -> None:
        self._record = BootRecord(Stage.ARGUMENTS)
        self._detail = _STAGE_WORDS[Stage.ARGUMENTS]
        self._arguments: dict[str, str] = {}
        self._capture_sizes: tuple[int, ...] = ()
        self._capture_name = "graph"
        self._loads_begun = 0
        self._requests_not_asked = False
        self._failures = FailureReader()

    def _begin(self) -> None:
        """A line that only the beginning of a start prints: forget an earlier start."""
        if self._record.stage is not Stage.ARGUMENTS or self._failures.failure() is not None:
            self._reset()

    def feed(self, line: str) -> None:
        """Take the next line, or several; line ends may be there or not."""
        for part in log_lines(line):
            self._feed(part)

    @property
    def progress(self) -> Progress:
        """How far the start has come."""
        return Progress(self._record.stage, self._detail)

    def record(self) -> BootRecord:
        """What has been told until now."""
        record = self._record
        if record.kv_tokens is None and record.kv_pools:
            record = replace(record, kv_tokens=record.kv_pools[0].tokens)
        failure = self._failures.failure()
        if failure is not None:
            failure = replace(failure, message=self._redacted(failure.message))
        return replace(record, degradations=self._degradations(record), failure=failure)

    def _feed(self, line: LogLine) -> None:
        text = line.text
        if "server_args=" in text:
            self._read_arguments(text)
            return
        self._failures.feed(line, self._record.stage)
        if not line.first_rank:
            return
        for name, pattern in _DEGRADATIONS:
            if pattern.search(text):
                self._degrade(name, text)
        if _NOT_ASKED in text:
            self._begin()
            self._requests_not_asked = True
        if self._record.version is None and "version" in text:
            version = _VERSION.search(text)
            self._record = replace(self._record, version=version[1] if version else None)
        if _MARKS.search(text):
            self._read_figures(text)

    def _read_arguments(self, text: str) -> None:
        self._begin()
        self._secrets.update(match["secret"] for match in _SECRET.finditer(text))
        for name in _ARGUMENTS:
            match = re.search(
                rf"""\b{name}['"]?\s*[=:]\s*(?:(['"])(?P<text>.{{0,400}}?)\1|(?P<word>[\w.-]{{1,40}}))""",
                text,
            )
            if match is not None:
                self._arguments[name] = match["text"] if match["text"] is not None else match["word"]
        version = _VERSION.search(text)
        self._record = replace(self._record, version=version[1] if version else self._record.version)
        self._enter(Stage.IMPORTS)

    def _argument(self, name: str) -> str | None:
        value = self._arguments.get(name)
        return None if value == "None" else value

    def _redacted(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return _SECRET_FLAG.sub("--api-key ***", _SECRET.sub("api_key=***", text))

    def _degrade(self, name: str, text: str) -> None:
        known = self._record.degradations
        if all(degradation.id != name for degradation in known):
            degradation = Degradation(name, self._redacted(text)[:400])
            self._record = replace(self._record, degradations=(*known, degradation))

    def _degradations(self, record: BootRecord) -> tuple[Degradation, ...]:
        """What is missing of what was asked for: a limit nobody set was not clamped."""
        kept = [
            degradation for degradation in record.degradations if not self._was_meant(degradation, record)
        ]
        asked = self._argument("max_running_requests") or ""
        alone = (self._argument("dp_size") or "1") == "1"
        if (
            asked.isdigit()
            and len(asked) < 10
            and alone
            and not self._requests_not_asked
            and record.max_running_requests is not None
            and record.max_running_requests < int(asked)
            and all(degradation.id != "requests-clamped" for degradation in kept)
        ):
            text = f"max_running_requests is {record.max_running_requests}, below the requested {asked}"
            kept.append(Degradation("requests-clamped", text))
        return tuple(kept)

    def _was_meant(self, degradation: Degradation, record: BootRecord) -> bool:
        if degradation.id == "requests-clamped":
            unset = self._arguments.get("max_running_requests") == "None"
            return self._requests_not_asked or unset
        if degradation.id == "prefill-graph-disabled":
            if any(graph.what == "prefill" and graph.role == "target" for graph in record.graphs):
                return True
            asked = (
                self._argument("device") == "cpu"
                or self._argument("disable_prefill_cuda_graph") == "True"
                or self._argument("disable_cuda_graph") == "True"
                or self._argument("cuda_graph_backend_prefill") == "disabled"
            )
            # The line is the same for a backend switched off by a person and by a rule of SGLang.
            return asked or ("prefill.backend='disabled'" in degradation.text and not self._arguments)
        return False

    def _enter(self, stage: Stage, detail: str | None = None) -> None:
        self._record = replace(self._record, stage=stage)
        self._detail = detail or _STAGE_WORDS[stage]

    def _read_figures(self, text: str) -> None:
        bar = _BAR.search(text)
        if bar is not None:
            self._read_bar(bar)
        elif "Load weight begin" in text:
            self._loads_begun += 1
            if self._record.free_before_load_gib is None:
                self._record = replace(self._record, free_before_load_gib=_gib(text, "avail mem"))
            self._enter(Stage.LOAD if self._loads_begun == 1 else Stage.DRAFT_LOAD)
        elif "Load weight end. elapsed=" in text:
            self._read_weights(text)
        elif "Reserving" in text and "multimodal" in text:
            self._record = replace(self._record, multimodal_reserve_gib=_first_gib(text))
            self._enter(Stage.POOLS)
        elif "Mamba Cache is allocated" in text:
            self._read_state_cache(text)
        elif "is allocated" in text or "VA upper bound" in text or "KV cache allocated" in text:
            self._read_kv_pool(text)
        elif "Memory pool end" in text:
            self._record = replace(self._record, free_after_pools_gib=_gib(text, "avail mem"))
            self._enter(Stage.POOLS)
        elif "max_total_num_tokens=" in text and "context_len=" in text:
            self._read_summary(text)
        elif "startup timings" in text:
            self._record = replace(self._record, startup_timings_s=_timings(text))
        elif "The server is fired up" in text:
            self._enter(Stage.SERVING)
        else:
            capture = _CAPTURE.search(text)
            if capture is not None:
                self._read_capture(capture, text)

    def _read_bar(self, bar: re.Match[str]) -> None:
        self._failures.went_on()
        count = f"{bar['done']}/{bar['all']}"
        if bar["what"] == "Capturing":
            self._detail = f"{self._capture_name} {count}"
        elif self._record.stage in (Stage.LOAD, Stage.DRAFT_LOAD):
            self._detail = f"{_STAGE_WORDS[self._record.stage]} {count}"

    def _read_weights(self, text: str) -> None:
        kind = _TYPE.search(text)
        figures = (_gib(text, "mem usage"), _number(text, "elapsed="), _gib(text, "avail mem"))
        memory, elapsed, free = figures
        if kind is not None and memory is not None and elapsed is not None and free is not None:
            loaded = LoadedWeights(kind[1], memory, elapsed, free)
            self._record = replace(self._record, weights=(*self._record.weights, loaded)[-8:])
        draft_follows = self._loads_begun == 1 and self._argument("speculative_draft_model_path") is not None
        self._enter(Stage.DRAFT_LOAD if draft_follows else Stage.SIZING)

    def _read_state_cache(self, text: str) -> None:
        slots = _number(text, "max_mamba_cache_size: ")
        conv, ssm = _gib(text, "conv_state size"), _gib(text, r"\bssm_state size")
        if slots is not None and conv is not None and ssm is not None:
            cache = StateCache(
                int(slots),
                conv,
                ssm,
                _gib(text, "intermediate_ssm_state_cache size") or 0.0,
                _gib(text, "intermediate_conv_window_cache size") or 0.0,
            )
            self._record = replace(self._record, state_cache=cache)
        self._enter(Stage.POOLS)

    def _read_kv_pool(self, text: str) -> None:
        tokens = _number(text, "#tokens: ")
        if tokens is None:
            return
        if not text.startswith("Post-capture"):
            self._enter(Stage.POOLS)
        halves = (_gib(text, r"\bK size"), _gib(text, r"\bV size"))
        whole = _gib(text, r"\bKV size")
        if whole is None and halves[0] is not None and halves[1] is not None:
            whole = halves[0] + halves[1]
        if whole is None:
            return
        dtype = _DTYPE.search(text)
        pool = KvPool(int(tokens), round(whole, 6), dtype[1] if dtype else None)
        pools = self._record.kv_pools
        if "Post-capture" in text:
            # The backing found after capture takes the place of the upper bound that was reserved.
            at = 1 if "draft" in text else 0
            pools = (*pools[:at], pool, *pools[at + 1 :])
        else:
            pools = (*pools, pool)[-8:]
        self._record = replace(self._record, kv_pools=pools)

    def _read_summary(self, text: str) -> None:
        self._record = replace(
            self._record,
            kv_tokens=_whole(text, "max_total_num_tokens="),
            chunked_prefill_size=_whole(text, "chunked_prefill_size="),
            max_running_requests=_whole(text, "max_running_requests="),
            context_tokens=_whole(text, "context_len="),
            free_at_ready_gib=_gib(text, r"available_[cgx]pu_mem"),
        )
        self._enter(Stage.WARM_UP)

    def _read_capture(self, capture: re.Match[str], text: str) -> None:
        label = capture["label"]
        role = "draft" if "draft" in label.lower() else "target"
        what = next((word for word in ("prefill", "extend", "verify", "decode") if word in label.lower()), "")
        what = what or ("prefill" if "piecewise" in label.lower() else "decode")
        sizes = _SIZES.search(text)
        listed = tuple(int(size) for size in re.findall(r"\d{1,9}", sizes["sizes"])) if sizes else ()
        if capture["edge"] == "begin":
            self._capture_sizes = listed
            self._capture_name = f"draft {what} graph" if role == "draft" else f"{what} graph"
            by_what = Stage.PREFILL_CAPTURE if what == "prefill" else Stage.DECODE_CAPTURE
            self._enter(
                Stage.DRAFT_CAPTURE if role == "draft" else by_what, f"capturing {self._capture_name}s"
            )
            return
        elapsed = _number(text, r"(?:elapsed=|Time elapsed: )")
        memory = _gib(text, "mem usage")
        if elapsed is None or memory is None:
            return
        graph = GraphCapture(role, what, listed or self._capture_sizes, elapsed, memory)
        self._record = replace(self._record, graphs=(*self._record.graphs, graph)[-32:])
        self._capture_sizes = ()


def read_boot_log(lines: Iterable[str]) -> BootRecord:
    """The boot record of a whole log."""
    log = BootLog()
    for line in lines:
        log.feed(line)
    return log.record()


def _number(text: str, label: str) -> float | None:
    match = re.search(label + _NUMBER, text)
    return float(match[1]) if match else None


def _whole(text: str, label: str) -> int | None:
    number = _number(text, label)
    return None if number is None else int(number)


def _gib(text: str, label: str) -> float | None:
    return _number(text, label + r"(?:=|: ?)(?=-?\d{1,12}(?:\.\d{1,9})? ?GB)")


def _first_gib(text: str) -> float | None:
    match = re.search(_NUMBER + r" ?GB", text)
    return float(match[1]) if match else None


def _timings(text: str) -> tuple[tuple[str, float], ...]:
    found: list[tuple[str, float]] = []
    for name, number, inner in _TIMING.findall(text):
        if number:
            found.append((name, float(number)))
        else:
            found += [(f"{name}.{part}", float(value)) for part, value, _ in _TIMING.findall(inner) if value]
    return tuple(found[:64])

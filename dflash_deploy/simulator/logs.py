"""SGLang's log lines, as the release writes them."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflash_deploy.simulator.physics.memory import Pools
    from dflash_deploy.simulator.settings import Settings

_CAPTURE_HINT = (
    "Possible solutions:\n"
    "1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)\n"
    "2. set --cuda-graph-max-bs-decode to a smaller value (e.g., 16)\n"
    "3. disable decode CUDA graph by --cuda-graph-backend-decode=disabled. "
    "(Not recommended. Huge performance loss)\n"
    "Open an issue on GitHub https://github.com/sgl-project/sglang/issues/new/choose \n"
)


def stamp() -> str:
    """The bracket in front of every line."""
    return time.strftime("[%Y-%m-%d %H:%M:%S]")


class Log:
    """Writes lines as SGLang does: its own to standard error, the web server's to standard output."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._err = err or sys.stderr

    def line(self, text: str) -> None:
        """One line of SGLang's own log."""
        self._write(self._err, f"{stamp()} {text}\n")

    def raw(self, text: str) -> None:
        """Text without a bracket: progress bars, tracebacks."""
        self._write(self._err, text)

    def access(self, text: str) -> None:
        """A line of the web server."""
        self._write(self._out, f"{stamp()} INFO:     {text}\n")

    @staticmethod
    def _write(stream: TextIO, text: str) -> None:
        try:
            stream.write(text)
            stream.flush()
        except (OSError, ValueError):
            # Nobody reads the log any more; the server goes on as SGLang's does.
            return


def load_end(*, elapsed_s: float, architecture: str, quant: str, free: float, used: float) -> str:
    """A model is in memory."""
    quant = f"{quant}, " if quant else ""
    return (
        f"Load weight end. elapsed={elapsed_s:.2f} s, type={architecture}, {quant}avail mem={free:.2f} GB, "
        f"mem usage={used:.2f} GB."
    )


def state_cache(pools: Pools, speculative: bool) -> str:
    """The recurrent-state cache is allocated."""
    text = (
        f"Mamba Cache is allocated. max_mamba_cache_size: {pools.slots}, conv_state size: "
        f"{pools.conv:.2f}GB, "
        f"ssm_state size: {pools.ssm:.2f}GB "
    )
    if speculative:
        text += (
            f"intermediate_ssm_state_cache size: {pools.verify_ssm:.2f}GB "
            f"intermediate_conv_window_cache size: {pools.verify_conv:.2f}GB "
        )
    return text


def kv_pool(dtype: str, tokens: int, gib: float) -> str:
    """A key/value pool is allocated."""
    return (
        f"KV Cache is allocated. dtype: {torch_dtype(dtype)}, #tokens: {tokens}, K size: {gib / 2:.2f} GB, "
        f"V size: {gib / 2:.2f} GB"
    )


def torch_dtype(dtype: str) -> str:
    """PyTorch's name of a number format."""
    return {
        "fp8_e4m3": "torch.float8_e4m3fn",
        "fp8_e5m2": "torch.float8_e5m2",
        "bfloat16": "torch.bfloat16",
    }.get(dtype, "torch.uint8")


def capture_begin(settings: Settings, *, role: str, what: str, sizes: Sequence[int], free: float) -> str:
    """Capturing a set of graphs begins."""
    if what == "prefill":
        return (
            f"Capture {role} prefill CUDA graph begin. backend=breakable, num_tokens={list(sizes)}, "
            f"avail mem={free:.2f} GB"
        )
    per_request = settings.speculation.draft_tokens if settings.speculation else 1
    name = "num_tokens_per_bs" if settings.release <= (0, 5, 15) else "num_tokens_per_req"
    listed = "" if settings.release >= (0, 5, 22) else f"bs={list(sizes)}, "
    return (
        f"Capture {role} {what} CUDA graph begin. backend=full, {name}={per_request}, "
        f"{listed}avail mem={free:.2f} GB"
    )


def capture_end(
    settings: Settings,
    *,
    role: str,
    what: str,
    sizes: Sequence[int],
    elapsed_s: float,
    used: float,
    free: float,
) -> str:
    """Capturing ended."""
    listed = f"bs={list(sizes)}, " if settings.release >= (0, 5, 22) and what != "prefill" else ""
    return (
        f"Capture {role} {what} CUDA graph end. {listed}elapsed={elapsed_s:.2f} s, mem usage={used:.2f} GB, "
        f"avail mem={free:.2f} GB."
    )


def progress(text: str, done: int, total: int, elapsed_s: float) -> str:
    """One state of a progress bar, in front of which the carriage returns."""
    share = done / total
    bar = ("█" * int(share * 10)).ljust(10)
    rate = done / elapsed_s if elapsed_s > 0 and done else 0.0
    end = "\n" if done == total else ""
    left_s = (total - done) / rate if rate else 0.0
    times = f"{_clock(elapsed_s)}<{_clock(left_s)}, {rate:5.2f}it/s"
    return f"\r{text}: {share:4.0%}|{bar}| {done}/{total} [{times}]{end}"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


def out_of_memory(card_mib: int, *, wanted: float, free: float) -> str:
    """PyTorch's complaint."""

    def amount(gib: float) -> str:
        return f"{gib:.2f} GiB" if gib >= 1 else f"{max(gib, 0) * 1024:.2f} MiB"

    total = card_mib / 1024
    used = total - max(free, 0)
    return (
        f"CUDA out of memory. Tried to allocate {amount(wanted)}. GPU 0 has a total capacity of "
        f"{total:.2f} GiB of "
        f"which {amount(free)} is free. Including non-PyTorch memory, this process has {used:.2f} GiB "
        "memory in use. "
        f"Of the allocated memory {used * 0.97:.2f} GiB is allocated by PyTorch, and "
        f"{used * 0.01 * 1024:.2f} MiB is "
        "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )


def decode_capture_failed(cause: str) -> str:
    """Why decode graphs could not be captured."""
    return f"Capture cuda graph failed: {cause}\n{_CAPTURE_HINT}"


def prefill_capture_failed(cause: str) -> str:
    """Why prefill graphs could not be captured."""
    return (
        f"Fail when using backend: breakable for prefill runner.\n{cause}\nPossible suggestions:\n"
        "1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)\n"
        "2. disable the prefill CUDA graph by --cuda-graph-backend-prefill=disabled\n"
        "Open an issue on GitHub https://github.com/sgl-project/sglang/issues/new/choose \n"
    )


def traceback_of(kind: str, message: str, place: str) -> str:
    """What Python prints of an exception, with SGLang's place in it."""
    return f'Traceback (most recent call last):\n  File "sglang/{place}", in <module>\n{kind}: {message}\n'


def usage(tokens: int, capacity: int, hybrid: bool, slots: tuple[int, int]) -> str:
    """How full the pools are."""
    share = tokens / capacity if capacity else 0.0
    if not hybrid:
        return f"#token: {tokens}, token usage: {share:.2f}"
    used, total = slots
    return (
        f"#full token: {tokens}, full token usage: {share:.2f}, mamba num: {used}, "
        f"mamba usage: {used / total if total else 0:.2f}"
    )

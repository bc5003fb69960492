"""Run by the interpreter that serves: try FlashInfer's back ends for per-tensor FP8 layers, and print JSON.

Each back end runs in a process of its own, so that one that dies or hangs takes nothing with it. It
multiplies M rows by a K x N weight for the shapes of a model and for several M, each new to it, and tells for
each the time of the first call, of later ones, and how far the result is from a float reference. Standard
library here; torch and flashinfer in the children.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None]

MARK = "DFLASH-DEPLOY-BMM "
SCHEMA_VERSION = 1
FIRST_PATH = "first-path"
"""What SGLang itself tries before FlashInfer on sm_12x (0.5.20 and newer)."""
BACKENDS = ("cublas", "cudnn", "cutlass", "auto", FIRST_PATH)
# K and N of Qwen3.8-27B's per-tensor FP8 layers on one GPU.
SHAPES = ((5120, 8192), (5120, 16384), (6144, 5120), (5120, 34816))
# Verify steps of one to three requests with eight draft tokens, a lone row, and sizes that prefill brings.
ROWS = (1, 8, 16, 24, 33, 129)
# The formats' own rounding is about 0.002; a wrong layout or scale is off by far more.
TOLERANCE = 0.02
_MAX_MESSAGE = 600
_PR_SET_PDEATHSIG = 1


def run_child(argv: list[str], *, load_timeout_s: float, call_timeout_s: float) -> dict[str, object]:
    """Run a child that prints a JSON line a call, and tell what became of it.

    Args:
        argv: its command line.
        load_timeout_s: longest wait for its first line; libraries are loaded and kernels compiled until then.
        call_timeout_s: longest wait for each later line.
    """
    lines: queue.Queue[str | None] = queue.Queue()
    calls: list[object] = []
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )

        def read() -> None:
            assert child.stdout is not None  # noqa: S101 - a pipe was asked for
            for line in child.stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        outcome, message, ended = "works", "", False
        timeout_s = load_timeout_s
        while True:
            try:
                line = lines.get(timeout=timeout_s)
            except queue.Empty:
                outcome, message = (
                    "stalls",
                    f"no answer for {timeout_s:.0f} s after {len(calls)} calls; ended",
                )
                break
            if line is None:
                break
            timeout_s = call_timeout_s
            said = _said(line)
            if "call" in said:
                calls.append(said["call"])
            elif "end" in said:
                ended, message = True, str(said.get("message") or "")
                outcome = str(said["end"])
        # Its own session: nothing else is in the group.
        if child.poll() is None and outcome == "stalls":
            os.killpg(child.pid, signal.SIGKILL)
        status = child.wait()
        if outcome == "works" and not ended:
            outcome, message = "fails", _how_it_ended(status, errors)
    if outcome == "works" and any(isinstance(call, dict) and not call.get("correct") for call in calls):
        outcome = "wrong"
    return {"outcome": outcome, "message": message or None, "calls": calls}


def _said(line: str) -> dict[str, object]:
    if not line.startswith(MARK):
        return {}
    try:
        said = json.loads(line[len(MARK) :])
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _how_it_ended(status: int, errors: IO[bytes]) -> str:
    errors.seek(0, os.SEEK_END)
    errors.seek(max(0, errors.tell() - 8192))
    text = errors.read().decode(errors="replace").strip()
    last = text.splitlines()[-1] if text else ""
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return f"its process ended with {how}" + (f": {last[-_MAX_MESSAGE:]}" if last else "")


def _tell(**said: object) -> None:
    sys.stdout.write(f"\n{MARK}{json.dumps(said)}\n")
    sys.stdout.flush()


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _driver() -> str | None:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:  # noqa: PTH123 - one line
            words = file.readline().split()
    except OSError:
        return None
    return next((word for word in words if word[:1].isdigit() and "." in word), None)


def _end_with_the_probe() -> None:
    """Have the kernel end this child as soon as the probe ends, however that comes about."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def child_facts() -> None:
    """Tell what device and libraries are here."""
    try:
        import torch  # noqa: PLC0415 - it may be absent, or fail

        there = torch.cuda.is_available()
        cudnn = torch.backends.cudnn.version() if there else None
    except Exception as error:  # noqa: BLE001 - any failure of foreign imports is an answer
        _tell(
            end="works", message=None, problem=f"torch cannot be used: {type(error).__name__}: {error}"[:500]
        )
        return
    if not there:
        _tell(end="works", problem="no CUDA device is here to measure on", torch=torch.__version__)
        return
    major, minor = torch.cuda.get_device_capability()
    _tell(
        end="works",
        device=f"{torch.cuda.get_device_name()} (sm_{major}{minor})",
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cudnn=_cudnn_text(cudnn),
    )


def _cudnn_text(number: int | None) -> str | None:
    """``92301`` as ``9.23.1``; before version 9 there were two digits less."""
    if number is None:
        return None
    if number >= 90000:
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return f"{number // 1000}.{number // 100 % 10}.{number % 100}"


def child_backend(backend: str, shapes: list[tuple[int, int]], rows: list[int], repeats: int) -> None:
    """Try one back end at every shape."""
    try:
        import torch  # noqa: PLC0415

        multiply = _first_path() if backend == FIRST_PATH else _flashinfer(backend)
        taken = 0
        for k, n in shapes:
            weight = torch.randn(n, k, device="cuda").clamp_(-4, 4).to(torch.float8_e4m3fn).t()
            for m in rows:
                taken += _one_shape(multiply, weight, m, repeats)
    except Exception as error:  # noqa: BLE001 - whatever a back end raises is the result
        kind = "absent" if isinstance(error, ImportError) else "fails"
        _tell(end=kind, message=f"{type(error).__name__}: {error}"[:_MAX_MESSAGE])
        return
    if not taken:
        _tell(end="absent", message="it takes none of these shapes here")
        return
    _tell(end="works", message=None)


def _flashinfer(backend: str) -> Multiply:
    import torch  # noqa: PLC0415
    from flashinfer import bmm_fp8  # type: ignore[import-not-found]  # noqa: PLC0415

    def multiply(
        rows: torch.Tensor, weight: torch.Tensor, row_scale: torch.Tensor, weight_scale: torch.Tensor
    ) -> torch.Tensor:
        product = bmm_fp8(
            rows.unsqueeze(0),
            weight.unsqueeze(0),
            row_scale.reshape(1),
            weight_scale.reshape(1),
            torch.bfloat16,
            backend=backend,
        )
        return product.view(rows.shape[0], weight.shape[1])

    return multiply


def _first_path() -> Multiply:
    import torch  # noqa: PLC0415
    from sglang.kernels.ops.gemm import try_sm120_fp8_linear  # noqa: PLC0415

    def multiply(
        rows: torch.Tensor, weight: torch.Tensor, row_scale: torch.Tensor, weight_scale: torch.Tensor
    ) -> torch.Tensor:
        dense = (rows.float() * row_scale).to(torch.bfloat16)
        return try_sm120_fp8_linear(dense, weight, row_scale, weight_scale)

    return multiply


def _one_shape(multiply: Multiply, weight: torch.Tensor, m: int, repeats: int) -> bool:
    import torch  # noqa: PLC0415

    k, n = weight.shape
    # Powers of two, so that scaling rounds nothing.
    row_scale = torch.tensor(0.5, device="cuda")
    weight_scale = torch.tensor(0.125, device="cuda")
    rows = torch.randn(m, k, device="cuda").clamp_(-4, 4).to(torch.float8_e4m3fn)
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = multiply(rows, weight, row_scale, weight_scale)
    torch.cuda.synchronize()
    first_s = time.perf_counter() - began
    if result is None:
        return False
    expected = (rows.float() @ weight.float()) * (row_scale * weight_scale)
    error = float((result.float() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())
    steady = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(10):
            multiply(rows, weight, row_scale, weight_scale)
        torch.cuda.synchronize()
        steady.append((time.perf_counter() - began) / 10)
    finite = error == error and error != float("inf")  # noqa: PLR0124 - not a number differs from itself
    call = {
        "m": m,
        "k": k,
        "n": n,
        "first_s": first_s,
        "steady_s": statistics.median(steady),
        "relative_error": error if finite else 1e9,
        "correct": finite and error < TOLERANCE,
    }
    _tell(call=call)
    return True


def probe(args: argparse.Namespace) -> dict[str, object]:
    """Try every back end, one after another."""
    this = [sys.executable, os.path.abspath(__file__), "--child"]  # noqa: PTH100 - not a path of links
    facts: dict[str, object] = {}
    for said in _lines([*this, "facts"], args.load_timeout_s):
        facts.update(said)
    report: dict[str, object] = {
        "schema_version": SCHEMA_VERSION,
        "measured": False,
        "problem": facts.get("problem"),
        "device": facts.get("device"),
        "torch": facts.get("torch"),
        "flashinfer": _version("flashinfer-python", "flashinfer"),
        "sglang": _version("sglang"),
        "cuda": facts.get("cuda"),
        "cudnn": facts.get("cudnn"),
        "driver": _driver(),
        "backends": [],
    }
    if facts.get("device") is None:
        report["problem"] = facts.get("problem") or "torch cannot be used: its process ended without a word"
        return report
    if report["flashinfer"] is None:
        report["problem"] = "flashinfer is not installed, so that this product is never taken"
        return report
    backends = []
    for backend in args.backends:
        sys.stderr.write(f"FP8 product by {backend} ...\n")
        sys.stderr.flush()
        shapes = ",".join(f"{k}x{n}" for k, n in args.shapes)
        rows = ",".join(map(str, args.rows))
        child = [*this, backend, "--shapes", shapes, "--rows", rows, "--repeats", str(args.repeats)]
        found = run_child(child, load_timeout_s=args.load_timeout_s, call_timeout_s=args.call_timeout_s)
        backends.append({"backend": backend, **found})
    return {**report, "measured": True, "backends": backends}


def _lines(argv: list[str], timeout_s: float) -> Iterator[dict[str, object]]:
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        yield {"problem": f"torch did not load within {timeout_s:.0f} s"}
        return
    yield from map(_said, done.stdout.splitlines())


def _shapes(text: str) -> list[tuple[int, int]]:
    return [(int(k), int(n)) for k, _, n in (shape.partition("x") for shape in text.split(","))]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    """Print the report as one JSON object after the mark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", type=lambda text: text.split(","), default=list(BACKENDS))
    parser.add_argument("--shapes", type=_shapes, default=list(SHAPES), help="KxN,KxN,...")
    parser.add_argument("--rows", type=_numbers, default=list(ROWS), help="M,M,...")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--load-timeout-s", type=float, default=900)
    parser.add_argument("--call-timeout-s", type=float, default=60)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        _end_with_the_probe()
    if args.child == "facts":
        child_facts()
    elif args.child is not None:
        child_backend(args.child, args.shapes, args.rows, args.repeats)
    else:
        sys.stdout.write(f"\n{MARK}{json.dumps(probe(args))}\n")


if __name__ == "__main__":
    main()

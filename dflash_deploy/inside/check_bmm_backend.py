"""Run by the interpreter that serves: does the installed per-tensor FP8 product work by its back end?

Prints JSON after the mark. Standard library, torch and sglang only. Argument: path of the module to check.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

MARK = "DFLASH-DEPLOY-CHECK "
_MODULE = "sglang.srt.layers.quantization.fp8_utils"
_ROWS, _K, _N = 24, 5120, 8192
_TOLERANCE = 0.02


def check(path: str) -> tuple[str, str]:
    """``passed``, ``failed`` or ``not-run``, and why."""
    try:
        compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError) as error:
        return "failed", f"{path} does not compile here: {error}"
    try:
        import torch  # noqa: PLC0415 - it may be absent, or fail

        if not torch.cuda.is_available():
            return "not-run", "it compiles; no CUDA device is here to multiply on"
        module = __import__(_MODULE, fromlist=["flashinfer_bmm_fp8"])
    except Exception as error:  # noqa: BLE001 - any failure of foreign imports is an answer
        return "not-run", f"it compiles; {_MODULE} cannot be imported here: {type(error).__name__}: {error}"[
            :500
        ]
    if not Path(module.__file__ or "").samefile(path):
        return "not-run", f"this interpreter imports another file: {module.__file__}"
    if not hasattr(module, "flashinfer_bmm_fp8"):
        return "not-run", "it compiles; this card does not take the call"
    rows = torch.randn(_ROWS, _K, device="cuda").clamp_(-4, 4).to(torch.float8_e4m3fn)
    weight = torch.randn(_N, _K, device="cuda").clamp_(-4, 4).to(torch.float8_e4m3fn).t()
    scale = torch.tensor(0.5, device="cuda")
    try:
        result = module.flashinfer_bmm_fp8(rows, weight, scale, scale, torch.bfloat16).float()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - whatever the back end raises is the finding
        return "failed", f"{type(error).__name__}: {error}"[:500]
    expected = (rows.float() @ weight.float()) * 0.25
    off = float((result - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())
    if not off < _TOLERANCE:
        return "failed", f"the product is off by {off:.3g} of its size"
    return "passed", f"the product of {_ROWS} x {_K} and {_K} x {_N} is right (off by {off:.2g} of its size)"


def main() -> None:
    """Print the finding."""
    outcome, message = check(sys.argv[1])
    sys.stdout.write(f"\n{MARK}{json.dumps({'outcome': outcome, 'message': message})}\n")


if __name__ == "__main__":
    main()

"""Run by the interpreter that serves: does the installed per-tensor FP8 product work by its back end?

Prints JSON after the mark. Standard library, torch and sglang only. Argument: path of the module to check.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_deploy.inside.patch_check import run
else:
    # Beside this script, for the interpreter that runs it.
    from patch_check import run

_MODULE = "sglang.srt.layers.quantization.fp8_utils"
_ROWS, _K, _N = 24, 5120, 8192
_TOLERANCE = 0.02


def look(module: ModuleType) -> tuple[str, str]:
    """``passed``, ``failed`` or ``not-run``, and why."""
    import torch  # noqa: PLC0415 - it may fail

    backend = getattr(module, "_DFLASH_DEPLOY_BMM_FP8_BACKEND", "the back end that the module names")
    if not torch.cuda.is_available():
        return "not-run", f"it compiles and takes {backend}; no CUDA device is here to multiply on"
    if not hasattr(module, "flashinfer_bmm_fp8"):
        return "not-run", f"it compiles and takes {backend}; this card does not take the call"
    rows = torch.randn(_ROWS, _K, device="cuda").clamp_(-4, 4).to(torch.float8_e4m3fn)
    weight = torch.randn(_N, _K, device="cuda").clamp_(-4, 4).to(torch.float8_e4m3fn).t()
    scale = torch.tensor(0.5, device="cuda")
    result = module.flashinfer_bmm_fp8(rows, weight, scale, scale, torch.bfloat16).float()
    torch.cuda.synchronize()
    expected = (rows.float() @ weight.float()) * 0.25
    off = float((result - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())
    if not off < _TOLERANCE:
        return "failed", f"the product by {backend} is off by {off:.3g} of its size"
    shape = f"{_ROWS} x {_K} and {_K} x {_N}"
    return "passed", f"the product of {shape} by {backend} is right (off by {off:.2g} of its size)"


if __name__ == "__main__":
    # What the patch was applied with is tried, whatever the shell around this says.
    os.environ.pop("DFLASH_BMM_FP8_BACKEND", None)
    run(_MODULE, "flashinfer_bmm_fp8", look)

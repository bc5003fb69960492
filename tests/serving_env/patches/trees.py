"""Installed SGLangs of our own writing: small trees with pip's metadata, and selectors in several shapes."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path

from dflash_deploy.serving_env.patches.description import patches_dir

DFLASH = "sglang/srt/models/dflash.py"
FP8 = "sglang/srt/layers/quantization/fp8_utils.py"

FP8_SOURCE = '''\
"""Products of FP8 layers."""

import torch


def supported():
    return True


if supported():
    from flashinfer import bmm_fp8 as _raw_flashinfer_bmm_fp8

    def flashinfer_bmm_fp8(rows, weight, row_scale, weight_scale, out_dtype):
        m, n = rows.shape[0], weight.shape[1]
        return _raw_flashinfer_bmm_fp8(
            rows.unsqueeze(0), weight.unsqueeze(0), row_scale, weight_scale,
            out_dtype,
            backend="cublas",  # the one that is known to work
        ).view(m, n)
'''

_HEADER = '''\
"""A draft with a candidate selector."""

import torch

DENSE = (torch.float16, torch.bfloat16, torch.float32)


def is_dense_head_weight(weight):
    return weight is not None and weight.dtype in DENSE


def _radix_topk(scores, k):
    if not scores.is_contiguous():
        raise RuntimeError("top_k: the input must be contiguous")
    return torch.topk(scores, k, dim=-1)


class DFlashDraftModel:
    pass
'''

METHOD = f'''\
{_HEADER}

class DFlash2DraftModel(DFlashDraftModel):
    def compute_candidates(self, hidden):
        """Candidates of each position."""
        k = self.candidate_selector.top_k
        weight = getattr(self.lm_head, "weight", None)
        if not is_dense_head_weight(weight):
            raise RuntimeError("the selector requires a dense target lm_head")
        org = int(self.lm_head.org_vocab_size)
        vals, ids = _radix_topk(torch.matmul(hidden.to(weight.dtype), weight[:org].T), k)
        return ids.long(), self._transform_unary_logits(vals)
'''

METHOD_WITH_TP = f"""\
{_HEADER}

TP_SIZE = 1


def get_parallel():
    return type("Parallel", (), {{"tp_size": TP_SIZE}})


class DFlash2DraftModel(DFlashDraftModel):
    @torch.no_grad()
    def compute_candidates(self, hidden):
        k = self.candidate_selector.top_k
        weight = getattr(self.lm_head, "weight", None)
        if weight is None or weight.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise RuntimeError("the selector requires a dense target lm_head")
        states = hidden.to(weight.dtype)
        if get_parallel().tp_size == 1:
            org = int(self.lm_head.org_vocab_size)
            vals, ids = _radix_topk(torch.matmul(states, weight[:org].T), k)
            return ids.long(), self._transform_unary_logits(vals)
        shard = self.lm_head.shard_indices
        vals, ids = _radix_topk(
            torch.matmul(states, weight[: int(shard.num_org_elements)].T),
            k,
        )
        return ids.long() + int(shard.org_vocab_start_index), self._transform_unary_logits(vals)
"""

FUNCTION = f"""\
{_HEADER}

def candidate_topk(hidden, lm_head, k):
    if not is_dense_head_weight(lm_head.weight):
        raise RuntimeError("the selector requires a dense target lm_head")
    logits = hidden.to(lm_head.weight.dtype) @ lm_head.weight[: lm_head.org_vocab_size].T
    vals, ids = _radix_topk(logits, k)
    return ids.long(), vals


class DFlash2DraftModel(DFlashDraftModel):
    def compute_candidates(self, hidden):
        ids, vals = candidate_topk(hidden, self.lm_head, self.candidate_selector.top_k)
        return ids, self._transform_unary_logits(vals)
"""

SHAPES: Mapping[str, str] = {"method": METHOD, "method with TP": METHOD_WITH_TP, "module function": FUNCTION}

FIXED = METHOD.replace(
    """        if not is_dense_head_weight(weight):
            raise RuntimeError("the selector requires a dense target lm_head")
        org = int(self.lm_head.org_vocab_size)
        vals, ids = _radix_topk(torch.matmul(hidden.to(weight.dtype), weight[:org].T), k)
""",
    """        logits = self.lm_head.quant_method.apply(self.lm_head, hidden, None).contiguous()
        logits[:, self.lm_head.org_vocab_size :] = float("-inf")
        vals, ids = _radix_topk(logits, k)
""",
)


def fp8_patched(backend: str, source: str = FP8_SOURCE) -> str:
    """``FP8_SOURCE`` as the patch leaves it."""
    put_in = (patches_dir() / "bmm-fp8-backend" / "replacement.py").read_text()
    block = (
        "# >>> dflash-deploy patch bmm-fp8-backend\n"
        + put_in.replace("${backend}", backend)
        + "# <<< dflash-deploy patch bmm-fp8-backend\n\n\n"
    )
    changed = source.replace("if supported():", block + "if supported():")
    return changed.replace('backend="cublas"', "backend=_DFLASH_DEPLOY_BMM_FP8_BACKEND")


def record_line(name: str, content: bytes) -> str:
    """A line of pip's RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}"


def install(
    site_packages: Path,
    *,
    version: str = "0.5.18",
    files: Mapping[str, str | bytes] | None = None,
    record: bool = True,
    line_end: str = "\n",
) -> Path:
    """Lay an installed SGLang out in a folder, as pip does."""
    packages = dict.fromkeys(("sglang/__init__.py", "sglang/srt/__init__.py"), "")
    packages |= dict.fromkeys(("sglang/srt/models/__init__.py", "sglang/srt/layers/__init__.py"), "")
    packages |= {"sglang/srt/layers/quantization/__init__.py": ""}
    contents = {**packages, DFLASH: METHOD, FP8: FP8_SOURCE, **(files or {})}
    info = f"sglang-{version}.dist-info"
    contents[f"{info}/METADATA"] = f"Metadata-Version: 2.4\nName: sglang\nVersion: {version}\n\nServes.\n"
    contents[f"{info}/INSTALLER"] = "pip\n"
    lines = []
    for name, content in contents.items():
        raw = content.encode() if isinstance(content, str) else content
        path = site_packages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
        lines.append(record_line(name, raw))
    lines += ["sglang/srt/models/__pycache__/dflash.cpython-311.pyc,,", f"{info}/RECORD,,"]
    if record:
        (site_packages / info / "RECORD").write_bytes("".join(line + line_end for line in lines).encode())
    return site_packages


def snapshot(folder: Path) -> dict[str, tuple[object, ...]]:
    """Everything about a folder that a reverted patch must leave as it was: kinds, modes, times and bytes."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        if "__pycache__" in path.parts:
            continue
        about = path.lstat()
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = ("link", str(path.readlink()))
        elif path.is_dir():
            found[name] = ("folder", about.st_mode)
        else:
            found[name] = ("file", about.st_mode, about.st_mtime_ns, path.read_bytes())
    return found

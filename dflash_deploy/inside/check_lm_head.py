"""Run by the interpreter that serves: does the DFlash2 selector take candidates from a quantised output head?

Imports the installed selector, hands it a small head of packed 4-bit weights whose padding rows would win if
they were let, and compares its candidates with those of the same head unpacked. Prints JSON after the mark.
Standard library, torch and sglang only. Argument: path of the module that is to be checked.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from dflash_deploy.inside.patch_check import run
else:
    # Beside this script, for the interpreter that runs it.
    from patch_check import run

_MODULE = "sglang.srt.models.dflash"
# Tokens, padding rows, hidden size, draft positions and candidates of the small head.
_TOKENS, _PADDING, _HIDDEN, _POSITIONS, _TAKEN = 500, 12, 64, 6, 16
# The magnitudes that four bits with a sign can hold (E2M1).
_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Scores of one head in two precisions are nearer than this; tokens whose scores are may change places.
_NEAR = 0.05


class PackedMethod:
    """A head's method in the manner of SGLang's: the weight is for it alone to read."""

    def __init__(self, scale: torch.Tensor) -> None:
        self._scale = scale

    def unpacked(self, packed: torch.Tensor) -> torch.Tensor:
        """The weight as floats."""
        import torch  # noqa: PLC0415

        levels = torch.tensor([*_LEVELS, *(-level for level in _LEVELS)], device=packed.device)
        low, high = levels[(packed & 15).long()], levels[(packed >> 4).long()]
        return torch.stack([low, high], dim=-1).flatten(1) * self._scale

    def apply(
        self, layer: SimpleNamespace, hidden: torch.Tensor, _bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits over the padded vocabulary: a view of a wider buffer, like those of kernels that pad."""
        import torch  # noqa: PLC0415

        weight = self.unpacked(layer.weight)
        logits = (hidden.float() @ weight.T).to(hidden.dtype)
        wide = torch.zeros(logits.shape[0], logits.shape[1] + 4, dtype=logits.dtype, device=logits.device)
        wide[:, : logits.shape[1]] = logits
        return wide[:, : logits.shape[1]]


def _heads(device: str) -> tuple[SimpleNamespace, SimpleNamespace]:
    """The same head packed and unpacked."""
    import torch  # noqa: PLC0415

    maker = torch.Generator(device="cpu").manual_seed(7)
    rows = _TOKENS + _PADDING
    packed = torch.randint(0, 256, (rows, _HIDDEN // 2), dtype=torch.uint8, generator=maker)
    scale = torch.rand(rows, 1, generator=maker) * 0.02 + 0.01
    scale[_TOKENS:] = 10.0
    method = PackedMethod(scale.to(device))
    shape = SimpleNamespace(num_org_elements=_TOKENS, org_vocab_start_index=0, num_added_elements=0)
    shared = {"org_vocab_size": _TOKENS, "shard_indices": shape, "tp_size": 1}
    weight = packed.to(device)
    quantised = SimpleNamespace(weight=weight, quant_method=method, **shared)
    dense = SimpleNamespace(weight=method.unpacked(weight), quant_method=None, **shared)
    return quantised, dense


def _candidates(
    module: ModuleType, head: SimpleNamespace, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    selector = SimpleNamespace(top_k=_TAKEN)
    model = SimpleNamespace(
        lm_head=head, candidate_selector=selector, _transform_unary_logits=lambda logits: logits.float()
    )
    ids, scores = module.DFlash2DraftModel.compute_candidates(model, hidden)[:2]
    return ids, scores.float()


def _problem(module: ModuleType) -> str | None:
    import torch  # noqa: PLC0415

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and hasattr(module, "_flashinfer_top_k"):
        setattr(module, "_flashinfer_top_k", None)  # noqa: B010 - a module of no known type
    if hasattr(module, "get_parallel"):
        # No server is up to ask; the patch is for one GPU.
        setattr(module, "get_parallel", lambda: SimpleNamespace(tp_size=1))  # noqa: B010
    views = _views_given_to_top_k(module)
    quantised, dense = _heads(device)
    hidden = torch.randn(_POSITIONS, _HIDDEN, generator=torch.Generator().manual_seed(11)).to(device)
    ids, scores = _candidates(module, quantised, hidden)
    wanted_ids, wanted_scores = _candidates(module, dense, hidden)
    if int(ids.max()) >= _TOKENS:
        return f"token {int(ids.max())} was proposed, which only pads the vocabulary"
    if views:
        return "FlashInfer's top-k would be given a view, which it refuses"
    if not torch.allclose(scores, wanted_scores, atol=_NEAR):
        off = float((scores - wanted_scores).abs().max())
        return f"the candidates' scores differ from those of the unpacked head by {off:.3g}"
    for got, wanted, wanted_score in zip(ids, wanted_ids, wanted_scores, strict=True):
        strange = set(got.tolist()) ^ set(wanted.tolist())
        # Only the last places may be in doubt, between tokens that score alike.
        if strange and float(wanted_score[-1]) + _NEAR < float(wanted_score[-1 - len(strange) // 2]):
            return f"the candidates differ from those of the unpacked head: {sorted(strange)}"
    return None


def _views_given_to_top_k(module: ModuleType) -> list[object]:
    """A list that grows when the module's top-k is called with anything but a contiguous tensor."""
    views: list[object] = []
    real = getattr(module, "_radix_topk", None)
    if real is not None:

        def watched(scores: torch.Tensor, k: int) -> object:
            if not scores.is_contiguous():
                views.append(scores.shape)
            return real(scores, k)

        setattr(module, "_radix_topk", watched)  # noqa: B010
    return views


def look(module: ModuleType) -> tuple[str, str]:
    """``passed`` or ``failed``, and why."""
    problem = _problem(module)
    if problem is not None:
        return "failed", problem
    return "passed", "a packed head gives the candidates of the same head unpacked, and no padding"


if __name__ == "__main__":
    run(_MODULE, "DFlash2DraftModel", look)

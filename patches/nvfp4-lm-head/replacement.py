import torch as _dflash_deploy_torch


def _dflash_deploy_quantised(head):
    """Whether the head holds packed weights that only its own method can read."""
    weight = getattr(head, "weight", None)
    dense = (_dflash_deploy_torch.float16, _dflash_deploy_torch.bfloat16, _dflash_deploy_torch.float32)
    if weight is None or weight.dtype in dense:
        return False
    method = getattr(head, "quant_method", None)
    return callable(getattr(method, "apply", None)) and not type(method).__name__.startswith("Unquantized")


def _dflash_deploy_candidate_logits(hidden, head, rows, dense):
    """Logits over the head's first ``rows`` tokens; the rest, which pads the vocabulary, is never taken."""
    if not _dflash_deploy_quantised(head):
        return dense()
    rows = int(rows)
    # A rank that holds a part of the vocabulary has fewer rows than the vocabulary.
    if int(getattr(head, "tp_size", 1)) > 1 or rows < int(getattr(head, "org_vocab_size", rows)):
        raise RuntimeError(
            "DFlash2 with a quantised lm_head works on one GPU (TP = 1) only under the dflash-deploy patch "
            "nvfp4-lm-head: each rank would take candidates of its own part of the vocabulary for all. "
            "Start with --tp-size 1, or use SGLang 0.5.19 or newer without the patch."
        )
    # FlashInfer's top-k takes no views, so that the padding is masked where it lies instead of cut off.
    logits = head.quant_method.apply(head, hidden, None).contiguous()
    if logits.shape[-1] > rows:
        logits[..., rows:] = float("-inf")
    return logits

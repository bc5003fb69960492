"""How a checkpoint says that it is quantised, in ``config.json`` and ModelOpt's ``hf_quant_config.json``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from dflash_deploy.checkpoint.json_text import Fields, Json, shown

_FP8_CACHE = "fp8_e4m3"


@dataclass(frozen=True)
class Quantization:
    """What the checkpoint declares; what its tensors are is told by their headers.

    Attributes:
        method: ``modelopt``, ``compressed-tensors``, ``awq``, ``gptq``, ``fp8`` ...
        algorithm: of ModelOpt (``MIXED_PRECISION``, ``NVFP4``), or the format of compressed-tensors.
        bits: of a weight, where one number holds for all.
        group_size: weights that share a scale, in one direction or two (``128x128``).
        layers: modules by algorithm, where they are listed one by one.
        excluded: modules or patterns left as they were.
        kv_cache_dtype: what the engine's ``auto`` comes to, None for the compute type.
        ignored_kv_cache_dtype: asked for in a way that the engine's ``auto`` does not follow.
    """

    method: str
    algorithm: str | None = None
    bits: int | None = None
    group_size: str | None = None
    layers: tuple[tuple[str, int], ...] = ()
    excluded: int = 0
    kv_cache_dtype: str | None = None
    ignored_kv_cache_dtype: str | None = None

    def __str__(self) -> str:
        parts = [self.method]
        if self.algorithm:
            parts.append(self.algorithm)
        if self.layers:
            parts.append("(" + ", ".join(f"{count} {name}" for name, count in self.layers) + ")")
        elif self.bits:
            parts.append(f"{self.bits}-bit")
        if self.group_size:
            parts.append(f"in groups of {self.group_size}")
        return " ".join(parts)


def read_quantization(config: Fields, modelopt: Fields | None) -> Quantization | None:
    """What is declared, None for a checkpoint that is not quantised.

    Args:
        config: ``config.json``; its ``quantization_config`` comes first, as with the engine.
        modelopt: ``hf_quant_config.json``, or None.
    """
    declared = config.inner("quantization_config") or config.inner("compression_config")
    if declared is None:
        text = config.inner("text_config")
        declared = text.inner("quantization_config") if text else None
    beside = (modelopt.inner("quantization") or modelopt) if modelopt is not None else None
    if declared is None:
        if beside is None:
            return None
        return _modelopt(beside, None)
    method = declared.text("quant_method") or ("modelopt" if beside is not None else "unnamed")
    if declared.text("quant_algo") is not None or method.startswith("modelopt"):
        return _modelopt(declared, beside)
    name = shown(method)
    match method:
        case "compressed-tensors":
            return _compressed_tensors(declared)
        case "fp8":
            block = declared.wholes("weight_block_size")
            cache = declared.text("kv_cache_quant_algo")
            return Quantization(
                name,
                bits=8,
                group_size="x".join(map(str, block)) if block else None,
                excluded=_count(declared, "modules_to_not_convert", "ignored_layers"),
                kv_cache_dtype=_FP8_CACHE if cache == "FP8" else None,
            )
        case _:
            size = declared.whole("group_size", least=-1)
            return Quantization(
                name,
                bits=declared.whole("bits") or declared.whole("w_bit"),
                group_size=str(size) if size and size > 0 else None,
                excluded=_count(declared, "modules_to_not_convert"),
            )


def _modelopt(declared: Fields, beside: Fields | None) -> Quantization:
    """ModelOpt's own, flat in ``config.json`` or in a file beside it, which completes it."""
    algorithm = declared.text("quant_algo") or (beside.text("quant_algo") if beside else None)
    layers = declared.inner("quantized_layers") or (beside.inner("quantized_layers") if beside else None)
    size = declared.whole("group_size") or (beside.whole("group_size") if beside else None)
    counted: Counter[str] = Counter()
    for key, value in (layers.values if layers else {}).items():
        name = value.get("quant_algo") if isinstance(value, dict) else None
        if not isinstance(name, str) or layers is None:
            raise declared.wrong(
                f"quantized_layers.{shown(key)}", "expected an object with quant_algo", value
            )
        counted[shown(name)] += 1
    cache = _cache_algorithm(declared) or (_cache_algorithm(beside) if beside else None)
    return Quantization(
        "modelopt",
        algorithm=shown(algorithm) if algorithm else None,
        group_size=str(size) if size else None,
        layers=tuple(sorted(counted.items())),
        excluded=_count(declared, "ignore", "exclude_modules"),
        kv_cache_dtype=_FP8_CACHE if cache == "FP8" else None,
        ignored_kv_cache_dtype=shown(cache) if cache and cache != "FP8" else None,
    )


def _cache_algorithm(declared: Fields) -> str | None:
    scheme = declared.values.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        return {8: "FP8", 4: "NVFP4"}.get(_bits(scheme)) if scheme.get("type") == "float" else None
    name = declared.text("kv_cache_quant_algo")
    return name.upper() if name and name.lower() not in ("none", "auto") else None


def _compressed_tensors(declared: Fields) -> Quantization:
    groups = declared.inner("config_groups")
    bits: set[int] = set()
    sizes: set[int] = set()
    for key in groups.values if groups else ():
        group = groups.inner(key) if groups else None
        weights = group.inner("weights") if group else None
        if weights is not None:
            bits.add(weights.whole("num_bits") or 0)
            sizes.add(weights.whole("group_size", least=-1) or 0)
    scheme = declared.inner("kv_cache_scheme")
    form = declared.text("format")
    size = min(sizes) if len(sizes) == 1 else 0
    return Quantization(
        "compressed-tensors",
        algorithm=shown(form) if form else None,
        bits=min(bits) or None if len(bits) == 1 else None,
        group_size=str(size) if size > 0 else None,
        excluded=_count(declared, "ignore"),
        ignored_kv_cache_dtype=f"{_bits(scheme.values)}-bit" if scheme else None,
    )


def _bits(scheme: Mapping[str, Json]) -> int:
    bits = scheme.get("num_bits")
    return bits if isinstance(bits, int) else 0


def _count(declared: Fields, *keys: str) -> int:
    for key in keys:
        found = declared.texts(key)
        if found is not None:
            return len(found)
    return 0

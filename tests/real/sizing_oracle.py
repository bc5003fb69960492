"""SGLang's own sizing, asked for figures: run by its interpreter, one JSON question and answer a line.

Its functions are real; what they would read of a device, a config file or a global is handed to them. It
answers for every release from 0.5.16 on: which one is a matter of ``PYTHONPATH``.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
import traceback
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
from transformers import AutoConfig

_register = AutoConfig.register
# A release may bring a configuration that the installed transformers has learnt since.
AutoConfig.register = staticmethod(lambda name, config, **_: _register(name, config, exist_ok=True))

from sglang.srt.configs.mamba_utils import (  # noqa: E402
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.layers.quantization import fp4_kv_cache_quant_method as fp4  # noqa: E402
from sglang.srt.mem_cache import allocation_sizing  # noqa: E402
from sglang.srt.mem_cache import kv_cache_configurator as configurator  # noqa: E402
from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype  # noqa: E402
from sglang.srt.model_executor import pool_configurator as pools  # noqa: E402
from sglang.srt.speculative import dflash_utils  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def kv_dtype(name: str, *, draft: bool, draft_name: str | None = None, backend: str | None = None):
    """Type of one number of a KV cache."""
    asked = {
        "server_args_kv_cache_dtype": name,
        "model": None,
        "model_dtype": torch.bfloat16,
        "is_draft_worker": draft,
        "is_dflash": True,
        "speculative_draft_attention_backend": backend,
        "speculative_draft_kv_cache_dtype": draft_name,
    }
    known = inspect.signature(configure_kv_cache_dtype).parameters
    return configure_kv_cache_dtype(**{key: value for key, value in asked.items() if key in known})[1]


def heads_of(model: dict, tp: int) -> int:
    from sglang.srt.configs.model_config import ModelConfig

    known = SimpleNamespace(get_total_num_kv_heads=lambda: model["kv_heads"], is_draft_model=False)
    return ModelConfig.get_num_kv_heads(known, tp)


def model_of(model: dict) -> SimpleNamespace:
    full, window = model["full_layers"], model["window_layers"]
    return SimpleNamespace(
        head_dim=model["head_dim"],
        v_head_dim=model["head_dim"],
        swa_head_dim=model["head_dim"],
        swa_v_head_dim=model["head_dim"],
        get_num_kv_heads=lambda tp, _dcp=1: heads_of(model, tp),
        get_swa_num_kv_heads=lambda tp: heads_of(model, tp),
        hf_config=SimpleNamespace(architectures=["None"]),
        context_len=model["context_tokens"],
        num_hidden_layers=model["layers"],
        is_multimodal=model["vision"],
        attention_arch=None,
        full_attention_layer_ids=list(range(full)),
        swa_attention_layer_ids=list(range(full, full + window)),
    )


def state_of(linear: dict, state: str, layers: int, tp: int) -> Mamba2CacheParams:
    shape = Mamba2StateShape.create(
        tp_world_size=tp,
        intermediate_size=linear["value_dim"] * linear["value_heads"],
        n_groups=linear["key_heads"],
        num_heads=linear["value_heads"],
        head_dim=linear["value_dim"],
        state_size=linear["key_dim"],
        conv_kernel=linear["conv_kernel"],
    )
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=DTYPES[state])
    return Mamba2CacheParams(shape=shape, layers=list(range(layers)), dtype=dtype)


def draft_cell(ask: dict) -> int | None:
    """What a token takes in the cache of a draft with its own shape, where the release works it out."""
    exact = getattr(dflash_utils, "dflash_draft_cell_size_per_token", None)
    if exact is None or ask["algorithm"] not in ("DFLASH", "DSPARK"):
        return None
    return exact(
        draft_model_config=model_of(ask["draft"]),
        draft_num_layers=ask["draft"]["layers"],
        draft_kv_cache_dtype=kv_dtype(
            ask["kv"], draft=True, draft_name=ask["draft_kv"], backend=ask["draft_backend"]
        ),
        tp_size=ask["tp"],
    )


def settings_of(ask: dict) -> SimpleNamespace:
    """Every setting in one bag: releases differ in which of their bags they look into."""
    lazy = ask["strategy"] == "extra_buffer_lazy" and ask["radix"]
    extra = ask["strategy"] != "no_buffer" and ask["radix"]
    settings = SimpleNamespace(
        mem_fraction_static=ask["fraction"],
        max_mamba_cache_size=ask["slots"],
        mamba_full_memory_ratio=ask["ratio"],
        swa_full_tokens_ratio=ask["window_ratio"],
        max_running_requests=ask["requests"],
        disable_overlap_schedule=not ask["overlap"],
        disable_radix_cache=not ask["radix"],
        max_total_tokens=ask["max_tokens"],
        chunked_prefill_size=ask["chunk"],
        page_size=ask["page"],
        prefill_max_requests=None,
        enable_unified_memory=False,
        enable_hisparse=False,
        kv_cache_dtype=ask["kv"],
        speculative_algorithm=ask["algorithm"],
        speculative_num_draft_tokens=ask["draft_tokens"],
        max_speculative_num_draft_tokens=ask["draft_tokens"],
        speculative_num_steps=ask["steps"],
        speculative_eagle_topk=1,
        disaggregation_mode="null",
        enable_pd_role_switch=False,
        mm_feature_transport=None,
        pp_size=1,
        dp_size=1,
        dcp_size=1,
        enable_mamba_extra_buffer=lambda: extra,
        enable_mamba_extra_buffer_lazy=lambda: lazy,
    )

    def override(_source: str, **written: int) -> None:
        for name, value in written.items():
            setattr(settings, name, value)

    settings.override = override
    return settings


@contextmanager
def handed(settings: SimpleNamespace, ask: dict, built_on: object):
    """What the sizing looks up, replaced in every module of it that looks."""
    parallel = SimpleNamespace(
        attn_tp_size=ask["tp"],
        tp_size=ask["tp"],
        attn_dcp_size=1,
        pp_size=1,
        launch_world_size=1,
        world_group=SimpleNamespace(cpu_group=None),
    )
    execution = SimpleNamespace(
        mamba=SimpleNamespace(
            enable_mamba_extra_buffer=settings.enable_mamba_extra_buffer(),
            enable_mamba_extra_buffer_lazy=settings.enable_mamba_extra_buffer_lazy(),
            enable_linear_replayssm_spec=ask["replay"] is not None,
            linear_replayssm_cache_len=ask["replay"] or 16,
        ),
        graph=SimpleNamespace(
            cuda_graph_config=SimpleNamespace(
                prefill=SimpleNamespace(backend=None, full_prefill_max_req=None)
            )
        ),
    )
    bags = ("schedule", "memory", "spec", "disagg", "mm", "model", "context", "server_args")
    names: dict[str, object] = {f"get_{bag}": lambda: settings for bag in bags}
    names |= {
        "get_parallel": lambda: parallel,
        "get_exec": lambda: execution,
        "get_world_group": lambda: SimpleNamespace(world_size=1, cpu_group=None),
        "get_available_gpu_memory": lambda *_, **__: ask["free_after_gib"],
        "configured_pp_size": lambda: 1,
        "mamba_extra_buffer_enabled": settings.enable_mamba_extra_buffer,
        "mamba_extra_buffer_lazy_enabled": settings.enable_mamba_extra_buffer_lazy,
        "max_speculative_num_draft_tokens": lambda: ask["draft_tokens"],
        "mambaish_config": lambda _: built_on,
        "kimi_linear_config": lambda _: None,
        # It says no where there is no CUDA.
        "is_float4_e2m1fn_x2": lambda dtype: dtype == torch.float4_e2m1fn_x2,
        "is_minimax_sparse": lambda _: False,
        "is_deepseek_dsa": lambda _: False,
        "is_deepseek_v4": lambda _: False,
        "compute_page_shard_scratch_bytes": lambda *_, **__: 0,
    }
    with ExitStack() as stack:
        for module in (configurator, pools, allocation_sizing):
            replace_in(stack, module, names)
        stack.enter_context(
            mock.patch(
                "sglang.srt.layers.cp.utils.get_glm_dsa_layer_split_effective_num_layers",
                lambda _, layers: layers,
            )
        )
        replace_in(stack, pools.DefaultPoolConfigurator, {"_compute_qsa_cell_size": lambda *_, **__: 0})
        replace_in(
            stack,
            fp4.KVCacheQuantMethodBase,
            {
                "configure_attention_backends_from_server_args": lambda method, _: (
                    method.configure_attention_backends("flashinfer", "flashinfer")
                )
            },
        )
        yield


def replace_in(stack: ExitStack, module: ModuleType | type, names: dict[str, object]) -> None:
    for name, value in names.items():
        if hasattr(module, name):
            stack.enter_context(mock.patch.object(module, name, value))


def kvc_of(ask: dict, settings: SimpleNamespace, mambaish: object) -> configurator.KVCacheConfigurator:
    """The configurator, with the fields of every release."""
    model = ask["model"]
    full, window = model["full_layers"], model["window_layers"]
    draft_layers = ask["draft"]["layers"] if ask["draft"] else None
    own_shape = ask["algorithm"] in ("DFLASH", "DSPARK")
    exact = draft_cell(ask)
    fields = {
        "device": "cpu",
        "gpu_id": 0,
        "ps": SimpleNamespace(attn_dp_size=1, pp_size=1, attn_tp_size=ask["tp"]),
        "pp_size": 1,
        "attn_dp_size": 1,
        "model_config": model_of(model),
        "model_dtype": torch.bfloat16,
        "spec_algorithm": SpeculativeAlgorithm.from_string(ask["algorithm"]),
        "spec_aux_config": SimpleNamespace(
            eagle_draft_num_layers=None if own_shape else draft_layers,
            eagle_draft_swa_num_layers=None,
            dflash_draft_num_layers=draft_layers if own_shape else None,
            dflash_draft_cell_size_per_token=exact,
        ),
        "dflash_draft_cell_size_per_token": exact,
        "kv_cache_dtype": kv_dtype(ask["kv"], draft=False),
        "kv_cache_dtype_str": ask["kv"],
        "page_size": ask["page"],
        "sliding_window_size": model["window"],
        "layer_info": SimpleNamespace(
            start_layer=0,
            end_layer=full + window,
            num_effective_layers=full,
            full_attention_layer_ids=list(range(full)),
            swa_attention_layer_ids=list(range(full, full + window)),
        ),
        "post_capture_kv_active": False,
        "use_mla_backend": False,
        "is_hybrid_swa": window > 0,
        "extra_mamba_cache_bytes_per_req": 0,
        "server_args": settings,
        "mambaish_config": mambaish,
        "hybrid_gdn_config": mambaish and True,
        "hybrid_kda_config": None,
        "is_draft_worker": False,
        "fused_entry_bytes": lambda _self, _pool: None,
    }
    kind = type("Handed", (configurator.KVCacheConfigurator,), fields)
    return object.__new__(kind)


def size(ask: dict) -> dict:
    """The whole sizing of one configuration."""
    if ask["algorithm"] == "NEXTN":
        # Its other name, by which the arguments are resolved.
        ask["algorithm"] = "EAGLE"
    linear = ask["linear"]
    settings = settings_of(ask)
    params = state_of(linear, ask["state"], ask["linear_layers"], ask["tp"]) if linear else None
    mambaish = params and SimpleNamespace(
        mamba2_cache_params=params, full_attention_layer_ids=list(range(ask["model"]["full_layers"]))
    )
    kvc = kvc_of(ask, settings, mambaish)
    answer: dict = {}
    if params is not None:
        answer["slot"] = params.mamba_cache_per_req
        rings = getattr(params, "replayssm_ring_bytes_per_req", None)
        answer["ring"] = rings(ask["ring_tokens"]) if rings else None
    with handed(settings, ask, mambaish):
        built = pools.create_memory_pool_configurator(kvc)
        answer["cell"] = built._cell_size
        if params is not None:
            answer["slots_per_request"] = kvc._calculate_mamba_ratio()
        try:
            budget = kvc._profile_available_bytes(ask["free_before_gib"])
            sized = kvc.config_from_budget(budget)
            answer |= {
                "tokens": sized.max_total_num_tokens,
                "window": sized.swa_max_total_num_tokens or 0,
                "requests": kvc.resolve_max_num_reqs(sized.max_total_num_tokens),
            }
        except (RuntimeError, ValueError) as error:
            answer["error"] = str(error)
    answer["slots"] = settings.max_mamba_cache_size if params is not None else 0
    return answer


def defaults(ask: dict) -> dict:
    """The default memory fraction, and the sizes of graphs."""
    from sglang.srt.server_args import ServerArgs

    try:
        from sglang.srt.arg_groups import memory_hook
    except ImportError:
        memory_hook = None
    backend = inspect.getmodule(memory_hook.handle_gpu_memory_settings if memory_hook else ServerArgs).Backend
    off = {name: ask[f"no_{name}_graphs"] for name in ("decode", "prefill")}
    phases = SimpleNamespace(
        decode=SimpleNamespace(
            backend=backend.DISABLED if off["decode"] else backend.FULL, max_bs=None, bs=None
        ),
        prefill=SimpleNamespace(
            backend=backend.DISABLED if off["prefill"] else backend.BREAKABLE, max_bs=None, bs=None
        ),
    )
    tower = SimpleNamespace(hidden_size=1152, depth=27)
    model = SimpleNamespace(
        is_multimodal=ask["vision"],
        attention_arch=None,
        hf_config=SimpleNamespace(vision_config=tower),
    )
    given = {
        "device": "cuda",
        "cuda_graph_config": phases,
        "chunked_prefill_size": ask["chunk"],
        "max_prefill_tokens": 16384,
        "max_running_requests": ask["requests"],
        "max_total_tokens": ask["max_tokens"],
        "context_length": ask["context"],
        "tp_size": ask["tp"],
        "pp_size": 1,
        "dp_size": 1,
        "attn_dp_size": 1,
        "enable_dp_attention": False,
        "model_path": "model",
        "mem_fraction_static": None,
        "language_only": False,
        "language_model_only": False,
        "disaggregation_mode": "null",
        "disable_cuda_graph_padding": False,
        "speculative_algorithm": "DFLASH" if ask["speculation"] else None,
        "speculative_num_draft_tokens": None,
        "moe_a2a_backend": "none",
        "enable_symm_mem": False,
        "enable_kv_cache_sharding": False,
    }
    if memory_hook is None:
        return _defaults_of_methods(ServerArgs, given, model, ask)
    server_args = SimpleNamespace(**given)
    names = {
        "get_device_memory_capacity": lambda _: ask["memory_mib"],
        "model_config_of": lambda _: model,
        "use_mla_backend": lambda _: False,
        "post_capture_kv_sizing_planned": lambda _: False,
        "attn_dp_enabled_of": lambda _: False,
        "get_platform": lambda: SimpleNamespace(is_xpu=False),
    }
    with ExitStack() as stack:
        replace_in(stack, memory_hook, names)
        try:
            from sglang.srt.arg_groups.model_overrides import qwen3_vl
        except ImportError:
            pass
        else:
            replace_in(stack, qwen3_vl, {"expand_multimodal_decode_graph_to_running_limit": lambda *_: None})
        takes_memory = len(inspect.signature(memory_hook.handle_gpu_memory_settings).parameters) > 1
        memory_hook.handle_gpu_memory_settings(server_args, *([ask["memory_mib"]] if takes_memory else []))
    found: dict = {}
    for _, declared in getattr(server_args, "_resolved_overrides", ()):
        found |= declared
    return _told({**vars(server_args), **found})


def _defaults_of_methods(kind: type, given: dict, model: SimpleNamespace, ask: dict) -> dict:
    """The same in releases whose arguments complete themselves."""
    fixed = {
        "get_model_config": lambda _: model,
        "use_mla_backend": lambda _: False,
        "post_capture_kv_sizing_planned": lambda _: False,
        "__setattr__": object.__setattr__,
    }
    server_args = object.__new__(type("Handed", (kind,), fixed))
    for name, value in given.items():
        setattr(server_args, name, value)
    server_args._handle_gpu_memory_settings(ask["memory_mib"])
    return _told(vars(server_args))


def _told(resolved: dict) -> dict:
    config = resolved["cuda_graph_config"]
    return {
        "fraction": resolved["mem_fraction_static"],
        "chunk": resolved["chunked_prefill_size"],
        "decode": list(config.decode.bs),
        "prefill": len(config.prefill.bs),
    }


def main() -> None:
    """Answer until the questions end."""
    logging.disable(logging.CRITICAL)
    print("ready", flush=True)  # noqa: T201
    for line in sys.stdin:
        ask = json.loads(line)
        try:
            answer = size(ask) if ask["what"] == "size" else defaults(ask)
        except Exception:  # noqa: BLE001 - told to the test
            answer = {"crash": traceback.format_exc()}
        print(json.dumps(answer), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()

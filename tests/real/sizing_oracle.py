"""SGLang's own sizing, asked for figures: run by its interpreter, one JSON question and answer a line.

Its functions are real; what they would read of a device, a config file or a global is handed to them.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.arg_groups import cuda_graph_hook, memory_hook
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.mem_cache import kv_cache_configurator as configurator
from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
from sglang.srt.model_executor import pool_configurator as pools
from sglang.srt.speculative import dflash_utils

GIB = 1 << 30
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Schedule(SimpleNamespace):
    """The bag of scheduling settings; the sizing writes the number of slots into it."""


def kv_dtype(name: str, *, draft: bool, draft_name: str | None = None, backend: str | None = None) -> int:
    """Bytes of one number."""
    _, dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=name,
        model=None,
        model_dtype=torch.bfloat16,
        is_draft_worker=draft,
        is_dflash=True,
        speculative_draft_attention_backend=backend,
        speculative_draft_kv_cache_dtype=draft_name,
    )
    return dtype


def heads_of(model: dict, tp: int) -> int:
    from sglang.srt.configs.model_config import ModelConfig

    known = SimpleNamespace(get_total_num_kv_heads=lambda: model["kv_heads"], is_draft_model=False)
    return ModelConfig.get_num_kv_heads(known, tp)


def model_of(model: dict) -> SimpleNamespace:
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


def cell_of(ask: dict, kvc: SimpleNamespace) -> int:
    """What a token is charged, by the methods of the pool configurator."""
    with (
        mock.patch.object(
            pools, "get_parallel", lambda: SimpleNamespace(attn_tp_size=ask["tp"], attn_dcp_size=1)
        ),
        mock.patch.object(pools, "is_minimax_sparse", lambda _: False),
        mock.patch.object(
            pools.DefaultPoolConfigurator, "_compute_qsa_cell_size", staticmethod(lambda **_: 0)
        ),
        mock.patch(
            "sglang.srt.layers.cp.utils.get_glm_dsa_layer_split_effective_num_layers",
            lambda _, layers: layers,
        ),
    ):
        built = object.__new__(pools.DefaultPoolConfigurator)
        built.kv_cache_dtype_str = ask["kv"]
        layers = ask["model"]["full_layers"]
        cell = built._compute_cell_size(kvc, layers)
    draft = ask["draft"]
    if draft is None:
        return cell
    if ask["algorithm"] in ("DFLASH", "DSPARK"):
        drafts = dflash_utils.dflash_draft_cell_size_per_token(
            draft_model_config=model_of(draft),
            draft_num_layers=draft["layers"],
            draft_kv_cache_dtype=kv_dtype(
                ask["kv"], draft=True, draft_name=ask["draft_kv"], backend=ask["draft_backend"]
            ),
            tp_size=ask["tp"],
        )
        return dflash_utils.scale_kv_cell_size_per_token_for_dflash(
            target_cell_size_per_token=cell,
            target_num_layers=layers,
            draft_num_layers=draft["layers"],
            draft_cell_size_per_token=drafts,
        )
    return cell + int(cell * draft["layers"] / layers)


def size(ask: dict) -> dict:
    """The whole sizing of one configuration."""
    model, linear = ask["model"], ask["linear"]
    speculation = ask["algorithm"] is not None
    schedule = Schedule(
        mem_fraction_static=ask["fraction"],
        max_mamba_cache_size=ask["slots"],
        mamba_full_memory_ratio=ask["ratio"],
        max_running_requests=ask["requests"],
        disable_overlap_schedule=not ask["overlap"],
        max_total_tokens=ask["max_tokens"],
        page_size=ask["page"],
        prefill_max_requests=None,
    )
    parallel = SimpleNamespace(
        attn_tp_size=ask["tp"],
        attn_dcp_size=1,
        pp_size=1,
        launch_world_size=1,
        world_group=SimpleNamespace(cpu_group=None),
    )
    memory = SimpleNamespace(
        disable_radix_cache=not ask["radix"], enable_unified_memory=False, enable_hisparse=False
    )
    replay = ask["replay"] is not None
    execution = SimpleNamespace(
        mamba=SimpleNamespace(
            enable_mamba_extra_buffer=ask["strategy"] != "no_buffer" and ask["radix"],
            enable_mamba_extra_buffer_lazy=ask["strategy"] == "extra_buffer_lazy" and ask["radix"],
            enable_linear_replayssm_spec=replay,
            linear_replayssm_cache_len=ask["replay"] or 16,
        ),
        graph=SimpleNamespace(
            cuda_graph_config=SimpleNamespace(
                prefill=SimpleNamespace(backend=None, full_prefill_max_req=None)
            )
        ),
    )
    spec = SimpleNamespace(speculative_num_draft_tokens=ask["draft_tokens"])
    params = state_of(linear, ask["state"], ask["linear_layers"], ask["tp"]) if linear else None
    kvc = object.__new__(configurator.KVCacheConfigurator)
    settings = {
        "device": "cuda",
        "gpu_id": 0,
        "pp_size": 1,
        "attn_dp_size": 1,
        "model_config": model_of(model),
        "spec_algorithm": SimpleNamespace(is_none=lambda: not speculation),
        "kv_cache_dtype": kv_dtype(ask["kv"], draft=False),
        "page_size": ask["page"],
        "post_capture_kv_active": False,
        "use_mla_backend": False,
        "is_hybrid_swa": False,
        "extra_mamba_cache_bytes_per_req": 0,
        "server_args": SimpleNamespace(enable_hisparse=False),
        "mambaish_config": None if params is None else SimpleNamespace(mamba2_cache_params=params),
        "hybrid_gdn_config": None if params is None else True,
        "hybrid_kda_config": None,
        "is_draft_worker": False,
        "kv_cache_dtype_str": ask["kv"],
    }
    for name, value in settings.items():
        setattr(kvc, name, value)
    cell = cell_of(ask, kvc)
    built = object.__new__(pools.DefaultPoolConfigurator)
    built._cell_size, built._fixed_overhead_bytes, built._zero_kv_max_tokens = cell, 0, 0

    def override(_source: str, **written: int) -> None:
        for name, value in written.items():
            setattr(schedule, name, value)

    patches = {
        "get_schedule": lambda: schedule,
        "get_parallel": lambda: parallel,
        "get_memory": lambda: memory,
        "get_exec": lambda: execution,
        "get_spec": lambda: spec,
        "get_disagg": lambda: SimpleNamespace(disaggregation_mode="null", enable_pd_role_switch=False),
        "get_mm": lambda: SimpleNamespace(mm_feature_transport=None),
        "get_context": lambda: SimpleNamespace(override=override),
        "get_available_gpu_memory": lambda *_, **__: ask["free_after_gib"],
    }
    answer: dict = {"cell": cell}
    if params is not None:
        answer["slot"] = params.mamba_cache_per_req
        answer["ring"] = params.replayssm_ring_bytes_per_req(ask["replay"] or 16)
    with (
        mock.patch.multiple(configurator, **patches),
        mock.patch.object(configurator.KVCacheConfigurator, "fused_entry_bytes", lambda *_: None),
        mock.patch(
            "sglang.srt.model_executor.pool_configurator.create_memory_pool_configurator", lambda _: built
        ),
    ):
        if params is not None:
            answer["slots_per_request"] = kvc._calculate_mamba_ratio()
        try:
            budget = kvc._profile_available_bytes(ask["free_before_gib"])
            sized = kvc.config_from_budget(budget)
            answer |= {
                "tokens": sized.max_total_num_tokens,
                "requests": kvc.resolve_max_num_reqs(sized.max_total_num_tokens),
            }
        except (RuntimeError, ValueError) as error:
            answer["error"] = str(error)
        answer["slots"] = schedule.max_mamba_cache_size if params is not None else 0
    return answer


def defaults(ask: dict) -> dict:
    """The default memory fraction, and the sizes of graphs."""
    backend = memory_hook.Backend
    phases = SimpleNamespace(
        decode=SimpleNamespace(
            backend=backend.DISABLED if ask["no_decode_graphs"] else backend.FULL, max_bs=None, bs=None
        ),
        prefill=SimpleNamespace(
            backend=backend.DISABLED if ask["no_prefill_graphs"] else backend.BREAKABLE, max_bs=None, bs=None
        ),
    )
    tower = SimpleNamespace(hidden_size=1152, depth=27)
    model = SimpleNamespace(
        is_multimodal=ask["vision"],
        attention_arch=None,
        hf_config=SimpleNamespace(vision_config=tower),
    )
    server_args = SimpleNamespace(
        device="cuda",
        cuda_graph_config=phases,
        chunked_prefill_size=ask["chunk"],
        max_prefill_tokens=16384,
        max_running_requests=ask["requests"],
        max_total_tokens=ask["max_tokens"],
        tp_size=ask["tp"],
        pp_size=1,
        attn_dp_size=1,
        model_path="model",
        mem_fraction_static=None,
        language_only=False,
        language_model_only=False,
        disaggregation_mode="null",
        disable_cuda_graph_padding=False,
        speculative_algorithm="DFLASH" if ask["speculation"] else None,
        speculative_num_draft_tokens=None,
        moe_a2a_backend="none",
        enable_symm_mem=False,
        enable_kv_cache_sharding=False,
    )
    with (
        mock.patch.object(memory_hook, "get_device_memory_capacity", lambda _: ask["memory_mib"]),
        mock.patch.object(memory_hook, "model_config_of", lambda _: model),
        mock.patch.object(memory_hook, "use_mla_backend", lambda _: False),
        mock.patch.object(memory_hook, "post_capture_kv_sizing_planned", lambda _: False),
        mock.patch.object(memory_hook, "attn_dp_enabled_of", lambda _: False),
        mock.patch.object(memory_hook, "get_platform", lambda: SimpleNamespace(is_xpu=False)),
        mock.patch(
            "sglang.srt.arg_groups.model_overrides.qwen3_vl.expand_multimodal_decode_graph_to_running_limit",
            lambda *_: None,
        ),
    ):
        memory_hook.handle_gpu_memory_settings(server_args)
    found: dict = {}
    for _, declared in server_args._resolved_overrides:
        found |= declared
    config = found.get("cuda_graph_config", phases)
    return {
        "fraction": found["mem_fraction_static"],
        "chunk": found.get("chunked_prefill_size", ask["chunk"]),
        "decode": list(config.decode.bs),
        "prefill": len(config.prefill.bs),
        "listed": cuda_graph_hook.generate_prefill_cuda_graph_batch_sizes(ask["chunk"] or 2048),
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

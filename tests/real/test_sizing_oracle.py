"""The plan's figures against the code of SGLang's releases, over random configurations: they are equal."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_deploy.checkpoint.cards import LinearAttention, ModelCard, load_model_card
from dflash_deploy.plan.cells import cells_of
from dflash_deploy.plan.settings import read_settings
from dflash_deploy.plan.sizing import Refused, size_pools

from .environment import SGLANG_VERSION
from .wheels import RELEASES, wheel

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

TARGET = load_model_card("qwen3.8-27b-nvfp4")
DRAFTS = {
    "DFLASH": load_model_card("qwen3.8-27b-dflash2"),
    "DSPARK": load_model_card("qwen3.8-27b-dspark"),
    "NEXTN": load_model_card("qwen3.8-27b-mtp"),
}
Oracle = Callable[[dict], dict]


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def oracle(release: str, sglang, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    """The sizing code of a release as a process that answers, in the environment of the newest."""
    program = Path(__file__).with_name("sizing_oracle.py")
    variables = sglang.environment.variables()
    if release != SGLANG_VERSION:
        folder = tmp_path_factory.mktemp(f"sglang-{release}")
        with zipfile.ZipFile(wheel(release)) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith("sglang/")])
        variables["PYTHONPATH"] = f"{folder}{os.pathsep}{variables['PYTHONPATH']}"
    process = subprocess.Popen(
        [str(sglang.environment.python), str(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )
    try:
        while (line := process.stdout.readline()) and line.strip() != "ready":
            pass
        assert line.strip() == "ready", "the oracle did not start"

        def ask(question: dict) -> dict:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            assert answer, "the oracle ended"
            read = json.loads(answer)
            assert "crash" not in read, read["crash"]
            return read

        yield ask
    finally:
        process.stdin.close()
        process.wait(60)


@st.composite
def models(draw: st.DrawFn) -> ModelCard:
    """Random shapes: dense, with window layers or hybrid; text only or not."""
    full = draw(st.integers(1, 24))
    linear_layers = draw(st.sampled_from([0, 0, 12, 24, 48]))
    window_layers = 0 if linear_layers else draw(st.sampled_from([0, 0, 6, 24]))
    linear = None
    if linear_layers:
        linear = LinearAttention(
            value_heads=draw(st.sampled_from([16, 32, 48, 64])),
            key_heads=draw(st.sampled_from([4, 8, 16])),
            value_dim=draw(st.sampled_from([64, 128])),
            key_dim=draw(st.sampled_from([64, 128])),
            conv_kernel=draw(st.integers(2, 5)),
        )
    return TARGET.model_copy(
        update={
            "layers": full + window_layers + linear_layers,
            "full_attention_layers": full + window_layers,
            "linear_attention_layers": linear_layers,
            "linear": linear,
            "sliding_layers": window_layers,
            "sliding_window": draw(st.sampled_from([512, 1024, 4096])) if window_layers else None,
            "kv_heads": draw(st.sampled_from([1, 2, 4, 8])),
            "head_dim": draw(st.sampled_from([64, 128, 256])),
            "max_context_tokens": draw(st.sampled_from([4096, 32768, 262144])),
            "state_dtype": draw(st.sampled_from(["float32", "bfloat16", None])) if linear_layers else None,
            "kv_cache_dtype": None,
            "vision": draw(st.booleans()),
        }
    )


CONFIGURATIONS = st.fixed_dictionaries(
    {
        "algorithm": st.sampled_from([None, "DFLASH", "DSPARK", "NEXTN"]),
        "draft_tokens": st.integers(2, 16),
        "fraction": st.floats(0.5, 1.0).map(lambda value: round(value, 3)),
        "kv": st.sampled_from(["auto", "bf16", "fp8_e4m3", "mxfp8", "nvfp4"]),
        "draft_kv": st.sampled_from([None, None, "auto", "bf16", "fp8_e4m3"]),
        "draft_backend": st.sampled_from([None, None, "fa4"]),
        "state": st.sampled_from([None, "float32", "bfloat16"]),
        "strategy": st.sampled_from(["no_buffer", "extra_buffer", "extra_buffer_lazy"]),
        "radix": st.booleans(),
        "overlap": st.booleans(),
        "slots": st.none() | st.integers(1, 200),
        "ratio": st.sampled_from([0.9, 0.9, 0.3, 3.51, 10.0]),
        "window_ratio": st.sampled_from([0.8, 0.8, 0.25, 1.0]),
        "requests": st.none() | st.integers(1, 64),
        "max_tokens": st.none() | st.integers(1, 2_000_000),
        "page": st.sampled_from([1, 1, 16, 64]),
        "chunk": st.sampled_from([2048, 8192, -1]),
        "tp": st.sampled_from([1, 1, 2, 4]),
        "replay": st.none() | st.integers(4, 32),
        "before": st.floats(8, 140),
        "loaded": st.floats(0.05, 0.95),
    }
)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(model=models(), chosen=CONFIGURATIONS)
def test_sizing(oracle: Oracle, release: str, model: ModelCard, chosen: dict):
    algorithm = chosen["algorithm"]
    if chosen["strategy"] == "extra_buffer_lazy" and not chosen["overlap"]:
        # Refused before any sizing.
        chosen = {**chosen, "strategy": "extra_buffer"}
    if release < "0.5.18":
        # They do not have the flag.
        chosen = {**chosen, "draft_kv": None}
    draft = DRAFTS.get(algorithm)
    if draft is not None and algorithm == "DSPARK":
        chosen = {**chosen, "draft_tokens": draft.block_size + 1}
    with_rings = algorithm == "NEXTN" and model.linear is not None and release > "0.5.16"
    replays = chosen["replay"] if with_rings else None
    flags: dict = {
        "mem-fraction-static": chosen["fraction"],
        "kv-cache-dtype": chosen["kv"],
        "mamba-radix-cache-strategy": chosen["strategy"],
        "disable-radix-cache": not chosen["radix"],
        "disable-overlap-schedule": not chosen["overlap"],
        "mamba-full-memory-ratio": chosen["ratio"],
        "swa-full-tokens-ratio": chosen["window_ratio"],
        "chunked-prefill-size": chosen["chunk"],
        "page-size": chosen["page"],
        "tp-size": chosen["tp"],
        "context-length": model.max_context_tokens,
    }
    optional = {
        "mamba-ssm-dtype": chosen["state"],
        "max-mamba-cache-size": chosen["slots"],
        "max-running-requests": chosen["requests"],
        "max-total-tokens": chosen["max_tokens"],
        "speculative-algorithm": algorithm,
        "speculative-num-draft-tokens": chosen["draft_tokens"] if algorithm else None,
        "speculative-draft-kv-cache-dtype": chosen["draft_kv"],
        "speculative-draft-attention-backend": chosen["draft_backend"],
        "enable-linear-replayssm-spec": True if replays else None,
        "linear-replayssm-cache-len": replays,
    }
    flags |= {name: value for name, value in optional.items() if value is not None}
    read = read_settings(flags, version=release, card_memory_mib=32607, target=model, draft=draft)
    cells = cells_of(read, model, draft)
    after = chosen["before"] * (1 - chosen["loaded"])
    mine = size_pools(
        read, cells, free_before_load_gib=chosen["before"], free_after_load_gib=after, target=model
    )

    state = chosen["state"] or (None if replays else model.state_dtype) or "float32"
    theirs = oracle(
        {
            "what": "size",
            "model": _shape(model),
            "draft": None if draft is None else _shape(draft),
            "linear": None if model.linear is None else model.linear.model_dump(),
            "linear_layers": model.linear_attention_layers,
            "draft_tokens": read.draft_tokens or None,
            "steps": read.draft_tokens - 1 if algorithm == "NEXTN" else 1 if algorithm else None,
            "state": state,
            "requests": read.running_requests,
            "replay": replays,
            "ring_tokens": read.replay_tokens or 16,
            "free_before_gib": chosen["before"],
            "free_after_gib": after,
            **{
                name: chosen[name]
                for name in chosen
                if name not in ("before", "loaded", "state", "requests", "replay", "draft_tokens")
            },
        }
    )
    assert cells.charged == theirs["cell"]
    assert cells.slot == theirs.get("slot", 0)
    if replays:
        assert cells.replay == theirs["ring"]
    if model.linear is not None:
        assert read.slots_per_request == theirs["slots_per_request"]
    if isinstance(mine, Refused) and mine.message.startswith("no GPU memory is left"):
        # Where the engine would name a fraction that is no larger than the one given.
        assert "Loaded weights leave no GPU memory" in theirs.get("error", ""), theirs
    elif isinstance(mine, Refused):
        assert mine.message == theirs.get("error"), theirs
    else:
        assert "error" not in theirs
        assert mine.kv_tokens == theirs["tokens"]
        assert mine.running_requests == theirs["requests"]
        assert mine.state_slots == theirs["slots"]
        assert mine.window_tokens == theirs["window"]


def _shape(model: ModelCard) -> dict:
    return {
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "layers": model.layers,
        "full_layers": model.full_attention_layers - model.sliding_layers,
        "window_layers": model.sliding_layers,
        "window": model.sliding_window,
        "context_tokens": model.max_context_tokens,
        "vision": model.vision,
    }


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    memory_mib=st.integers(8_000, 300_000),
    vision=st.booleans(),
    chunk=st.none() | st.integers(64, 32_768),
    requests=st.none() | st.integers(1, 300),
    max_tokens=st.none() | st.integers(64, 100_000),
    context=st.none() | st.integers(256, 100_000),
    tp=st.sampled_from([1, 2, 4, 8]),
    speculation=st.booleans(),
    no_decode_graphs=st.booleans(),
    no_prefill_graphs=st.booleans(),
)
def test_defaults(oracle: Oracle, release: str, **chosen):
    theirs = oracle({"what": "defaults", **chosen})
    target = TARGET if chosen["vision"] else TARGET.model_copy(update={"vision": False})
    names = {
        "chunk": "chunked-prefill-size",
        "requests": "max-running-requests",
        "max_tokens": "max-total-tokens",
        "context": "context-length",
    }
    flags: dict = {flag: chosen[name] for name, flag in names.items() if chosen[name] is not None}
    flags["tp-size"] = chosen["tp"]
    if chosen["speculation"]:
        flags |= {"speculative-algorithm": "DFLASH", "speculative-num-draft-tokens": 8}
    flags["disable-decode-cuda-graph"] = chosen["no_decode_graphs"]
    flags["disable-prefill-cuda-graph"] = chosen["no_prefill_graphs"]
    read = read_settings(
        flags, version=release, card_memory_mib=chosen["memory_mib"], target=target, draft=None
    )
    assert read.fraction == pytest.approx(theirs["fraction"], abs=1e-9)
    assert read.chunk_tokens == theirs["chunk"]
    if not chosen["no_decode_graphs"]:
        assert list(read.graph_batches) == theirs["decode"]
    if not chosen["no_prefill_graphs"]:
        assert len(read.prefill_sizes) == theirs["prefill"]

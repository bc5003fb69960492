"""Whatever flags are given, a start ends in one of SGLang's ways, never in a traceback of our own."""

from __future__ import annotations

import contextlib
import io

from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_deploy.simulator.shipped import card_ids, models
from dflash_deploy.simulator.virtual import Ask, run_virtual

STAGES = {
    "arguments", "load", "draft-load", "sizing", "pools", "prefill-capture", "decode-capture",
    "draft-capture", "warm-up", "serving",
}  # fmt: skip
PATHS = [model.path or model.id for model in models()]


def flag(name: str, values: st.SearchStrategy[object]) -> st.SearchStrategy[list[str]]:
    return st.one_of(
        st.just([]), st.just([]), values.map(lambda value: [f"--{name}", *map(str, value)]
                                             if isinstance(value, list) else [f"--{name}={value}"])
    )  # fmt: skip


numbers = st.one_of(st.integers(-2, 40), st.integers(0, 300_000), st.just(10**12))
FLAGS = st.tuples(
    flag("mem-fraction-static", st.one_of(st.floats(0.7, 0.99), st.floats(allow_nan=True))),
    flag("max-total-tokens", numbers),
    flag("max-running-requests", numbers),
    flag("max-mamba-cache-size", numbers),
    flag("mamba-full-memory-ratio", st.one_of(st.floats(-1, 20), st.floats())),
    flag("mamba-ssm-dtype", st.sampled_from(["float32", "bfloat16", "int8"])),
    flag(
        "mamba-radix-cache-strategy",
        st.sampled_from(["auto", "no_buffer", "extra_buffer", "extra_buffer_lazy"]),
    ),
    flag("kv-cache-dtype", st.sampled_from(["auto", "fp8_e4m3", "fp8_e5m2", "bfloat16", "nvfp4", "mxfp8"])),
    flag("chunked-prefill-size", numbers),
    flag("max-prefill-tokens", numbers),
    flag("context-length", numbers),
    flag("page-size", numbers),
    flag("cuda-graph-max-bs-decode", st.integers(-2, 600)),
    flag("cuda-graph-bs-decode", st.lists(st.integers(-1, 600), min_size=1, max_size=6)),
    flag("cuda-graph-bs-prefill", st.lists(st.integers(-1, 9000), min_size=1, max_size=6)),
    flag("cuda-graph-config", st.sampled_from(['{"decode": {"backend": "disabled"}}', "{}", "[]", "no"])),
    flag(
        "speculative-algorithm",
        st.sampled_from(["DFLASH", "dspark", "EAGLE", "NEXTN", "NGRAM", "EAGLE3", "X"]),
    ),
    flag("speculative-draft-model-path", st.sampled_from(PATHS)),
    flag("speculative-num-draft-tokens", st.integers(-1, 64)),
    flag("speculative-num-steps", st.integers(-1, 9)),
    flag("speculative-eagle-topk", st.integers(-1, 9)),
    flag("speculative-draft-window-size", numbers),
    flag("mamba-track-interval", st.integers(-1, 600)),
    flag("decode-log-interval", st.integers(-1, 600)),
    flag("stream-interval", st.integers(-1, 600)),
    st.sampled_from([[], ["--disable-radix-cache"]]),
    st.sampled_from([[], ["--disable-overlap-schedule"]]),
    st.sampled_from([[], ["--enable-torch-compile"]]),
    st.sampled_from([[], ["--language-model-only"]]),
    st.sampled_from([[], ["--enable-linear-replayssm-spec"]]),
    st.sampled_from(
        [[], ["--disable-prefill-cuda-graph"], ["--disable-decode-cuda-graph"], ["--disable-cuda-graph"]]
    ),
).map(lambda parts: [word for part in parts for word in part])


@settings(max_examples=150)
@given(
    flags=FLAGS,
    path=st.sampled_from([*PATHS[:4], *PATHS, "x/y"]),
    card=st.sampled_from(card_ids()),
    seed=st.integers(0, 9),
)
def test_any_flags(flags: list[str], path: str, card: str, seed: int) -> None:
    asks = [Ask(prompt_tokens=30, new_tokens=40, name=str(number)) for number in range(3)]
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            run = run_virtual(["--model-path", path, *flags], [asks], card=card, seed=seed)
    except SystemExit as refused:
        assert refused.code == 2
        assert "error:" in complaint.getvalue()
        return
    if run.served:
        assert run.up is not None
        assert run.rounds[0].total_tokens_per_s > 0
        assert 0 < run.vram_used_mib <= run.up.settings.card.memory_mib
    else:
        assert run.stage in STAGES

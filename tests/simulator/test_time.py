from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.simulator.physics.acceptance import acceptance
from dflash_deploy.simulator.virtual import Ask, Round, VirtualRun, run_virtual

from .conftest import DFLASH2, FOUR_USERS, NVFP4, ONE_USER

TABLE = Path(__file__).resolve().parents[2] / "benchmarks" / "simulator_table.py"


def warm(flags: str, users: int = 1, rounds: int = 2, card: str = "rtx-5090", **ask: object) -> Round:
    asks = [Ask(name=f"prompt {number}", **ask) for number in range(users)]  # type: ignore[arg-type]
    run = run_virtual(flags.split(), [asks] * rounds, card=card)
    assert run.served, run.message
    return run.rounds[-1]


def failed(flags: str, asks: list[Ask] | None = None, card: str = "rtx-5090") -> VirtualRun:
    run = run_virtual(flags.split(), [asks or [Ask()]], card=card)
    assert not run.served
    return run


def test_published_figures_are_met() -> None:
    found = subprocess.run(
        [sys.executable, str(TABLE), "--json"], capture_output=True, text=True, timeout=100, check=False
    )
    rows = json.loads(found.stdout)
    far = [row for row in rows if abs(row["difference"]) > row["allowed"]]
    assert found.returncode == 0, far
    assert {row["card"] for row in rows} >= {
        "rtx-5090", "rtx-pro-6000", "rtx-4090", "rtx-3090", "dgx-spark", "h200", "a100-80gb",
    }  # fmt: skip
    write_up = [row for row in rows if row["source"] == "write-up"]
    assert len(write_up) == 10
    assert all(row["allowed"] == 0.05 for row in write_up)


def test_the_same_run_twice_is_the_same() -> None:
    assert warm(FOUR_USERS, 4) == warm(FOUR_USERS, 4)


def test_seeds_differ_within_their_bounds() -> None:
    speeds = []
    for seed in range(1, 9):
        run = run_virtual(ONE_USER.split(), [[Ask()]] * 2, seed=seed)
        assert run.served
        speeds.append(run.rounds[-1].median_tokens_per_s)
    assert len(set(speeds)) == len(speeds)
    assert all(abs(speed / 205.9 - 1) < 0.12 for speed in speeds)


def test_tasks_differ_in_acceptance() -> None:
    speed = {task: warm(ONE_USER, task=task).median_tokens_per_s for task in ("prose", "instruction", "code")}
    assert speed["prose"] < speed["instruction"] < speed["code"]


def test_draft_tokens_beyond_the_trained_block_pay_less_and_less() -> None:
    speeds = [
        warm(f"{FOUR_USERS} --speculative-num-draft-tokens {tokens}", 4).total_tokens_per_s
        for tokens in (2, 4, 6, 8, 10)
    ]
    gains = [later - earlier for earlier, later in itertools.pairwise(speeds)]
    assert all(gain > 0 for gain in gains)
    assert gains == sorted(gains, reverse=True)


def test_batches_beyond_the_captured_sizes_run_eager() -> None:
    captured = warm(FOUR_USERS, 4).total_tokens_per_s
    eager = warm(FOUR_USERS.replace("--cuda-graph-bs-decode 1 2 3 4", "--cuda-graph-bs-decode 1 2"), 4)
    assert eager.total_tokens_per_s < captured / 2


def test_more_users_than_may_run_wait() -> None:
    four, eight = warm(FOUR_USERS, 4), warm(FOUR_USERS, 8)
    assert max(eight.ttft_s) > max(four.ttft_s) + 3
    assert eight.total_tokens_per_s == pytest.approx(four.total_tokens_per_s, rel=0.1)


def test_context_costs_time() -> None:
    short = warm(ONE_USER)
    long = warm(ONE_USER, prompt_tokens=16_000)
    assert long.median_tokens_per_s < short.median_tokens_per_s
    assert long.median_ttft_s > 10 * short.median_ttft_s


def test_float32_state_is_slower_than_bfloat16() -> None:
    flags = ONE_USER.replace("0.85", "0.92")
    float32 = flags.replace("bfloat16", "float32")
    assert warm(float32).median_tokens_per_s < warm(flags).median_tokens_per_s


def test_a_full_pool_sends_requests_back() -> None:
    flags = FOUR_USERS.replace("--max-total-tokens 8192", "--max-total-tokens 3600")
    asks = [Ask(name=f"prompt {number}", new_tokens=1400) for number in range(4)]
    run = run_virtual(flags.split(), [asks])
    assert run.served
    assert any(line.startswith("KV cache pool is full. Retract requests.") for line in run.log)
    assert run.rounds[0].total_tokens_per_s > 0


def test_a_lost_draft_graph_is_told_and_slower() -> None:
    run = run_virtual(ONE_USER.replace("0.85", "0.955").split(), [[Ask()]] * 2)
    assert run.served
    assert run.up is not None
    assert run.up.draft_graph_lost
    assert any("Disable DFLASH draft cuda graph because only" in line for line in run.log)
    assert run.rounds[-1].median_tokens_per_s == pytest.approx(205.9 * 173.0 / 204.7, rel=0.05)


@pytest.mark.parametrize(
    ("flags", "stage", "message"),
    [
        (ONE_USER.replace("0.85", "0.80"), "sizing", "Loaded weights leave no GPU memory for the KV cache"),
        (f"{NVFP4} {DFLASH2}", "sizing", "Not enough GPU memory for hybrid (mamba/linear-attention) state"),
        (ONE_USER.replace("0.85", "0.995"), "pools", "CUDA out of memory. Tried to allocate"),
        (
            f"{NVFP4} --mem-fraction-static 0.965 --max-running-requests 1",
            "prefill-capture",
            "Fail when using backend: breakable for prefill runner.",
        ),
        (
            f"{NVFP4} --mem-fraction-static 0.95 --max-running-requests 24 --mamba-ssm-dtype bfloat16 "
            "--disable-radix-cache --disable-prefill-cuda-graph",
            "decode-capture",
            "Capture cuda graph failed: CUDA out of memory.",
        ),
        (ONE_USER.replace("0.85", "0.97"), "warm-up", "CUDA out of memory. Tried to allocate"),
        ("--model-path Qwen/Qwen3.8-27B", "load", "CUDA out of memory. Tried to allocate"),
    ],
)  # fmt: skip
def test_where_memory_runs_out(flags: str, stage: str, message: str) -> None:
    run = failed(flags)
    assert (run.stage, message in run.message) == (stage, True), run.message[:300]


def test_memory_runs_out_under_load() -> None:
    tight = ONE_USER.replace("0.85", "0.945")
    assert run_virtual(tight.split(), [[Ask()]]).served
    run = failed(tight, [Ask(prompt_tokens=16_000)])
    assert run.stage in ("serving", "warm-up")
    assert run.message.startswith("CUDA out of memory.")


@pytest.mark.parametrize("card", ["rtx-4090", "rtx-3090", "h200", "a100-80gb"])
def test_nvfp4_needs_blackwell(card: str) -> None:
    run = failed(NVFP4, card=card)
    assert run.stage == "load"
    assert "is not supported for the current GPU. Minimum capability: 100." in run.message


def test_unified_memory_is_guarded_by_the_host() -> None:
    flags = f"{NVFP4} --max-running-requests 8 --max-mamba-cache-size 40 --mem-fraction-static"
    assert run_virtual([*flags.split(), "0.8"], [[Ask()]], card="dgx-spark").served
    assert not run_virtual([*flags.split(), "0.95"], [[Ask()]], card="dgx-spark").served


@given(
    task=st.sampled_from(["instruction", "math", "code", "prose"]),
    method=st.sampled_from(["dflash", "dspark", "mtp", "ngram"]),
    tokens=st.integers(1, 32),
    factor=st.floats(0.95, 1.05),
)
def test_accept_length_is_between_one_and_all(task: str, method: str, tokens: int, factor: float) -> None:
    law = acceptance(task=task, method=method, draft_tokens=tokens, block_size=8, factor=factor)
    assert 1 <= law.mean_length <= tokens
    draws = law.drawn(0.3)
    drawn = [draws.next() for _ in range(400)]
    assert all(1 <= length <= tokens for length in drawn)
    assert sum(drawn) / len(drawn) == pytest.approx(law.mean_length, rel=0.03)


def test_a_hidden_factor_scales_the_accepted_drafts() -> None:
    plain = acceptance(task="instruction", method="dflash", draft_tokens=8, block_size=8)
    better = acceptance(task="instruction", method="dflash", draft_tokens=8, block_size=8, factor=1.05)
    assert better.mean_length - 1 == pytest.approx(1.05 * (plain.mean_length - 1), rel=0.001)


def test_a_card_that_is_held_back_takes_as_much_longer_for_everything() -> None:
    plain, hot = (run_virtual(ONE_USER.split(), [[Ask()]] * 2, slow=slow).rounds[-1] for slow in (1.0, 1.25))
    assert hot.total_tokens_per_s * 1.25 == pytest.approx(plain.total_tokens_per_s, rel=0.01)
    assert hot.ttft_s[0] == pytest.approx(plain.ttft_s[0] * 1.25, rel=0.05)

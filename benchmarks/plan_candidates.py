"""How long it takes to plan a search space: ``python benchmarks/plan_candidates.py``."""

from __future__ import annotations

import time

from dflash_deploy.checkpoint.cards import load_model_card
from dflash_deploy.plan.candidates import search_space
from dflash_deploy.plan.vram import Question

CHOICES = {
    "mem-fraction-static": [0.80 + step / 100 for step in range(16)],
    "cuda-graph-bs-decode": [(1,), (1, 2)],
    "speculative-num-draft-tokens": [4, 6, 8, 10, 12],
    "max-mamba-cache-size": [4, 5, 6, 8],
    "max-total-tokens": [None, 16384, 20480, 24576, 32768],
    "disable-radix-cache": [False, True],
    "kv-cache-dtype": ["fp8_e4m3", "bfloat16"],
}
SHARED = {
    "speculative-algorithm": "DFLASH",
    "mamba-ssm-dtype": "bfloat16",
    "mamba-radix-cache-strategy": "extra_buffer_lazy",
    "disable-prefill-cuda-graph": True,
    "max-running-requests": 1,
}


def main() -> None:
    question = Question(
        32607,
        load_model_card("qwen3.8-27b-nvfp4"),
        load_model_card("qwen3.8-27b-dflash2"),
        SHARED,
        "0.5.23",
    )
    begun, begun_cpu = time.perf_counter(), time.process_time()
    found = search_space(question, CHOICES, context_tokens=16384)
    taken_s, taken_cpu_s = time.perf_counter() - begun, time.process_time() - begun_cpu
    print(f"{found.examined:,} of {found.size:,} configurations planned in {taken_s:.2f} s (measured)")
    each = 10_000 / found.examined
    print(f"10,000 take {taken_s * each:.2f} s, {taken_cpu_s * each:.2f} s of them computing (measured)")
    print(f"{len(found.candidates):,} may serve; dropped:")
    for reason, count in sorted(found.dropped.items(), key=lambda item: -item[1]):
        print(f"  {count:>6,}  {reason}")
    print("the first three (predicted):")
    for candidate in found.candidates[:3]:
        searched = {name: value for name, value in candidate.flags.items() if name in CHOICES}
        budget = candidate.budget
        print(f"  {budget.kv_tokens:,} tokens, {budget.headroom_mib:,.0f} MiB left: {searched}")


if __name__ == "__main__":
    main()

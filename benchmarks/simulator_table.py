"""Prints published measurements beside what the simulator gives for the same settings (simulated).

    python benchmarks/simulator_table.py          the table
    python benchmarks/simulator_table.py --json   the same for scripts

Exits with 1 when a difference is larger than the row allows.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import cache

from dflash_deploy.simulator.virtual import Ask, VirtualRun, run_virtual

NVFP4 = "--model-path RadixArk/Qwen3.8-27B-NVFP4"
FP8 = "--model-path Qwen/Qwen3.8-27B-FP8"
BF16 = "--model-path Qwen/Qwen3.8-27B"
W4A16 = "--model-path RedHatAI/Qwen3.8-27B-quantized.w4a16"
DFLASH2 = "--speculative-algorithm DFLASH --speculative-draft-model-path incoai/Qwen3.8-27B-DFlash2"
DSPARK = "--speculative-algorithm DSPARK --speculative-draft-model-path RadixArk/Qwen3.8-27B-DSpark"
MTP = "--speculative-algorithm EAGLE"

ONE_USER = (
    "--mem-fraction-static 0.85 --max-running-requests 1 --max-mamba-cache-size 4 --mamba-ssm-dtype bfloat16 "
    "--mamba-radix-cache-strategy extra_buffer_lazy --kv-cache-dtype fp8_e4m3 --disable-prefill-cuda-graph"
)
COOKBOOK = (
    "--mem-fraction-static 0.91 --max-running-requests 1 --chunked-prefill-size 1024 "
    "--mamba-ssm-dtype bfloat16"
)
FOUR_USERS = (
    "--mem-fraction-static 0.95 --max-total-tokens 8192 --max-running-requests 4 --max-mamba-cache-size 4 "
    "--disable-radix-cache --mamba-ssm-dtype bfloat16 --kv-cache-dtype fp8_e4m3 --disable-prefill-cuda-graph "
    "--cuda-graph-bs-decode 1 2 3 4"
)
PRO_6000 = "--mem-fraction-static 0.85 --chunked-prefill-size 2048 --max-running-requests 4"
SPARK = (
    "--mem-fraction-static 0.8 --max-running-requests 8 --max-mamba-cache-size 40 --mamba-ssm-dtype bfloat16"
)
LARGE = "--mem-fraction-static 0.85 --max-running-requests 8"
SMALL = (
    "--mem-fraction-static 0.95 --max-total-tokens 8192 --max-running-requests 1 --max-mamba-cache-size 1 "
    "--disable-radix-cache --mamba-ssm-dtype bfloat16 --kv-cache-dtype fp8_e4m3 --disable-prefill-cuda-graph"
)


@dataclass(frozen=True)
class Row:
    """One published figure and how it is played.

    Attributes:
        what: ``user``, ``total``, ``ttft``, ``cold-ttft`` or ``vram``.
        source: who published it; ``not SGLang`` where the engine is another or not stated.
    """

    card: str
    name: str
    flags: str
    published: float
    allowed: float
    what: str = "user"
    users: int = 1
    task: str = "instruction"
    source: str = "write-up"


ROWS = (
    Row("rtx-5090", "plain", f"{NVFP4} {ONE_USER}", 62.14, 0.05),
    Row("rtx-5090", "DSpark", f"{NVFP4} {ONE_USER} {DSPARK}", 152.14, 0.05),
    Row(
        "rtx-5090",
        "DFlash2, decode graphs off",
        f"{NVFP4} {ONE_USER} {DFLASH2} --disable-decode-cuda-graph",
        63.85,
        0.05,
    ),
    Row("rtx-5090", "DFlash2", f"{NVFP4} {ONE_USER} {DFLASH2}", 207.52, 0.05),
    Row("rtx-5090", "DFlash2, memory used", f"{NVFP4} {ONE_USER} {DFLASH2}", 29076, 0.05, "vram"),
    Row("rtx-5090", "four users, in all", f"{NVFP4} {FOUR_USERS} {DFLASH2}", 719.84, 0.05, "total", 4),
    Row("rtx-5090", "four users, median user", f"{NVFP4} {FOUR_USERS} {DFLASH2}", 192.30, 0.05, "user", 4),
    Row(
        "rtx-5090", "four users, first token, warm", f"{NVFP4} {FOUR_USERS} {DFLASH2}", 0.222, 0.05, "ttft", 4
    ),
    Row(
        "rtx-5090",
        "four users, first token, cold",
        f"{NVFP4} {FOUR_USERS} {DFLASH2}",
        1.16,
        0.05,
        "cold-ttft",
        4,
    ),
    Row("rtx-5090", "four users, memory used", f"{NVFP4} {FOUR_USERS} {DFLASH2}", 31211, 0.05, "vram", 4),
    Row("rtx-5090", "MTP", f"{NVFP4} {ONE_USER} {MTP}", 124.0, 0.15, source="B048, B049"),
    Row("rtx-5090", "DFlash2, cookbook setting", f"{NVFP4} {COOKBOOK} {DFLASH2}", 203.0, 0.15, source="B053"),
    Row("rtx-pro-6000", "NVFP4, plain", f"{NVFP4} {PRO_6000}", 65.59, 0.15, source="B041"),
    Row("rtx-pro-6000", "NVFP4, MTP", f"{NVFP4} {PRO_6000} {MTP}", 141.0, 0.15, source="B039"),
    Row(
        "rtx-pro-6000",
        "NVFP4, DFlash2",
        f"{NVFP4} {PRO_6000} {DFLASH2}",
        225.17,
        0.15,
        source="A01, at accept length 4.65",
    ),
    Row("rtx-pro-6000", "FP8, DFlash2", f"{FP8} {PRO_6000} {DFLASH2}", 108.75, 0.15, source="B034"),
    Row(
        "rtx-pro-6000",
        "FP8, DFlash2, four users",
        f"{FP8} {PRO_6000} {DFLASH2}",
        390.23,
        0.15,
        "total",
        4,
        source="B035",
    ),
    Row("dgx-spark", "plain", f"{NVFP4} {SPARK}", 12.56, 0.15, source="B259"),
    Row("dgx-spark", "DSpark", f"{NVFP4} {SPARK} {DSPARK}", 28.46, 0.15, source="B263"),
    Row("dgx-spark", "DFlash2, code", f"{NVFP4} {SPARK} {DFLASH2}", 56.32, 0.15, task="code", source="B273"),
    Row(
        "dgx-spark", "DFlash2, essay", f"{NVFP4} {SPARK} {DFLASH2}", 28.08, 0.15, task="prose", source="B274"
    ),
    Row("dgx-spark", "DFlash2, math", f"{NVFP4} {SPARK} {DFLASH2}", 47.72, 0.15, task="math", source="B196"),
    Row("h200", "BF16, plain", f"{BF16} {LARGE}", 68.8, 0.15, source="B063"),
    Row("h200", "BF16, DFlash2, math", f"{BF16} {LARGE} {DFLASH2}", 236.1, 0.15, task="math", source="B063"),
    Row("h200", "BF16, DFlash2, chat", f"{BF16} {LARGE} {DFLASH2}", 184.0, 0.15, source="B065"),
    Row("a100-80gb", "BF16, plain", f"{BF16} {LARGE}", 28.9, 0.15, source="B062, not SGLang"),
    Row("a100-80gb", "BF16, DFlash2", f"{BF16} {LARGE} {DFLASH2}", 59.1, 0.15, source="B062, not SGLang"),
    Row("rtx-3090", "W4A16, plain", f"{W4A16} {SMALL}", 45.75, 0.15, source="B138, not SGLang"),
    Row(
        "rtx-3090",
        "W4A16, DFlash2",
        f"{W4A16} {SMALL} {DFLASH2}",
        135.0,
        0.15,
        source="B150, median of B150 to B152",
    ),
    Row("rtx-4090", "W4A16, DFlash2", f"{W4A16} {SMALL} {DFLASH2}", 109.0, 0.15, source="B061, not SGLang"),
)


@cache
def play(card: str, flags: str, users: int, task: str) -> VirtualRun:
    """A cold round and two warm ones."""
    asks = [Ask(task=task, name=f"prompt {number}") for number in range(users)]
    return run_virtual(flags.split(), [asks] * 3, card=card)


def simulate(row: Row) -> float:
    """The row's figure by the simulator."""
    run = play(row.card, row.flags, row.users, row.task)
    if not run.served:
        raise SystemExit(f"{row.card}, {row.name}: {run.stage}: {run.message}")
    cold, warm = run.rounds[0], run.rounds[-1]
    return {
        "user": warm.median_tokens_per_s,
        "total": warm.total_tokens_per_s,
        "ttft": warm.median_ttft_s,
        "cold-ttft": cold.median_ttft_s,
        "vram": float(run.vram_used_mib),
    }[row.what]


UNITS = {"user": "tokens/s", "total": "tokens/s", "ttft": "s", "cold-ttft": "s", "vram": "MiB"}


def main() -> int:
    found = [(row, simulate(row)) for row in ROWS]
    wrong = [row for row, value in found if abs(value / row.published - 1) > row.allowed]
    if "--json" in sys.argv[1:]:
        records = [
            {
                "card": row.card,
                "name": row.name,
                "source": row.source,
                "unit": UNITS[row.what],
                "published": row.published,
                "simulated": round(value, 4),
                "difference": round(value / row.published - 1, 4),
                "allowed": row.allowed,
            }
            for row, value in found
        ]
        print(json.dumps(records, indent=1))
        return 1 if wrong else 0
    print(f"{'card':13} {'setting':31} {'published':>10} {'simulated':>10} {'':8} {'difference':>10}  source")
    for row, value in found:
        places = 3 if UNITS[row.what] == "s" else 0 if row.what == "vram" else 2
        mark = "  too far" if row in wrong else ""
        print(
            f"{row.card:13} {row.name:31} {row.published:10.{places}f} {value:10.{places}f} "
            f"{UNITS[row.what]:8} {value / row.published - 1:+10.1%}  {row.source}{mark}"
        )
    print("Published: by others. Simulated: seed 0, virtual clock.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

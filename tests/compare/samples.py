"""Result files made by hand, with figures that a reader can check."""

from datetime import UTC, datetime

from dflash_deploy.bench.results import (
    AgreementRow,
    LoadRows,
    Machine,
    Quality,
    ResultFile,
    RoundRow,
    Run,
    UserRow,
    Workload,
)

HASH = "0" * 64


def round_of(name, speed, *, users=1, counts=True):
    return RoundRow(
        name=name,
        counts=counts,
        tokens_per_s=speed * users,
        user_tokens_per_s=speed,
        ttft_s=0.25,
        wall_s=1024 / speed,
        users=[
            UserRow(
                user=user, prompt_tokens=20, output_tokens=1024, ttft_s=0.25, tokens_per_s=speed, wall_s=9.0
            )
            for user in range(users)
        ],
    )


def run_of(name, speeds, *, users=1, repeat=1, **more):
    rounds = [round_of("cold", speeds[0] / 2, users=users, counts=False)]
    rounds += [round_of(str(number), speed, users=users) for number, speed in enumerate(speeds, 1)]
    given = {
        "outcome": "served",
        "model": "/models/qwen",
        "engine": "sglang",
        "engine_version": "0.5.23",
        "flags": {"mem-fraction-static": 0.9},
        "vram_used_mib": 30000,
        "vram_total_mib": 32607,
        "loads": [LoadRows(users=users, rounds=rounds)],
    }
    return Run(name=name, repeat=repeat, **(given | more))


def result_of(*runs, kind="measured", sha256=HASH, **more):
    given = {
        "tool_version": "0.1",
        "created": datetime(2026, 11, 30, tzinfo=UTC),
        "machine": Machine(card="rtx-5090", cpu="a CPU"),
        "workload": Workload(protocol="compare", output_tokens=1024, sha256=sha256),
    }
    return ResultFile(kind=kind, runs=list(runs), **(given | more))


AGREED = Quality(
    asked={"exact": 10},
    right={"exact": 9},
    agreement={
        "alone": AgreementRow(prompts=6, identical=4, diverge_after=81.0, counted=True),
        "together": AgreementRow(prompts=6, identical=6, diverge_after=None, counted=True),
    },
)

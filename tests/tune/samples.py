"""Profiles and records for tests, with only what a test cares about said."""

from __future__ import annotations

from datetime import UTC, datetime

from dflash_deploy.bench.measurement import Measurement, RoundFigures, Spread
from dflash_deploy.engine.boot import BootRecord, Stage
from dflash_deploy.profile.schema import Profile
from dflash_deploy.tune.records import StudyRecord, TrialRecord


def profile(**given) -> Profile:
    content = {
        "summary": "a profile for tests",
        "model": {"target": "qwen3.8-27b-nvfp4"},
        "engine": {"version": "0.5.23"},
        "workload": {"users": 2, "context_tokens": 1000, "output_tokens": 64},
        "objective": {"optimize": "total_tokens_per_s"},
        "search": {"max-running-requests": {"low": 1, "high": 4, "step": 1}},
        "service": {"name": "test"},
    }
    return Profile.model_validate(content | given)


def study(**given) -> StudyRecord:
    return StudyRecord(
        name="sample",
        created=datetime(2026, 1, 1, tzinfo=UTC),
        tool_version="0",
        simulated=True,
        seed=0,
        card="rtx-5090",
        engine_version="0.5.23",
        profile=profile(**given),
    )


def measurement(rounds=(100.0, 101.0, 102.0), **given) -> Measurement:
    middle = sorted(rounds)[len(rounds) // 2]
    spread = Spread(middle, min(rounds), max(rounds))
    content = {
        "users": 2,
        "rounds": len(rounds),
        "total_tokens_per_s": spread,
        "user_tokens_per_s": Spread(middle / 2, min(rounds) / 2, max(rounds) / 2),
        "ttft_s": Spread(0.2, 0.1, 0.3),
        "latency_s": Spread(2.0, 1.5, 2.5),
        "ttft_p95_s": 0.29,
        "cold_ttft_s": 1.0,
        "output_tokens": 128 * len(rounds),
        "per_round": tuple(RoundFigures(one, one / 2, 0.2, 200 / one) for one in rounds),
    }
    return Measurement(**(content | given))


def trial(number, rounds=None, **given) -> TrialRecord:
    measured = measurement(rounds) if rounds else None
    content = {
        "number": number,
        "source": "search",
        "flags": {"max-running-requests": number},
        "argv": ["python"],
        "env": {},
        "outcome": "served" if rounds else "failed",
        "measured": measured,
        "objective": measured.total_tokens_per_s.median if measured else None,
        "feasible": rounds is not None,
        "started": datetime(2026, 1, 1, tzinfo=UTC),
        "wall_s": 1.0,
    }
    return TrialRecord.model_validate(content | given)


def boot(**given) -> BootRecord:
    return BootRecord(Stage.SERVING, **given)

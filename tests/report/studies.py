"""Studies on disk for reports to be made of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dflash_deploy.tune.records import StudyRecord, TrialRecord, trial_folder, write_record
from tests.tune import samples

KNOWN = {"name": "hand-tuned", "source": "made up", "flags": {"max-running-requests": 1}}


def study_of(trials: Sequence[TrialRecord], folder: Path, **given) -> Path:
    """Write a study and its trials."""
    record: StudyRecord = samples.study(**({"known": [KNOWN]} | given))
    write_record(folder / "study.json", record)
    for trial in trials:
        write_record(trial_folder(folder, trial.number) / "trial.json", trial)
    return folder


def usual(folder: Path) -> Path:
    """One of everything: a known setting, a better one, one out of bounds, a failure, a refusal, faults."""
    measured = samples.measurement((100.0, 101.0, 99.0), vram_used_mib=30_000, vram_total_mib=32_607)
    better = samples.measurement(
        (110.0, 111.0, 112.0),
        vram_used_mib=30_500,
        vram_total_mib=32_607,
        accept_length=4.5,
        samples=("Once upon a time\nthere was a card.",),
    )
    trials = [
        samples.trial(
            1, source="known:hand-tuned", outcome="served", feasible=True, measured=measured
        ).model_copy(update={"objective": 100.0, "boot_s": 40.0, "wall_s": 60.0}),
        samples.trial(
            2, outcome="served", feasible=True, measured=better, boot=samples.boot(kv_tokens=9000)
        ).model_copy(update={"objective": 111.0, "boot_s": 30.0, "wall_s": 70.0}),
        samples.trial(3, reason="decode-capture: out of memory", wall_s=20.0),
        samples.trial(4, argv=[], outcome="infeasible", reason="by the plan 300 MiB are missing"),
        samples.trial(5, argv=[], outcome="infeasible", reason="by the plan 1200 MiB are missing"),
        samples.trial(
            6,
            outcome="bad-output",
            reason="loop: 2 of 6 answers",
            measured=samples.measurement(faults=("loop: 2 of 6 answers, for example abab",)),
        ),
    ]
    return study_of(trials, folder)

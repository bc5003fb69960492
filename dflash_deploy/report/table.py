"""The report's trials as CSV, a row each, for a spreadsheet."""

from __future__ import annotations

import csv
import io

from dflash_deploy.report import words
from dflash_deploy.report.contents import Report
from dflash_deploy.tune.records import TrialRecord

_FIGURES = (
    "objective",
    "total_tokens_per_s",
    "user_tokens_per_s",
    "ttft_s",
    "ttft_p95_s",
    "latency_s",
    "accept_length",
    "vram_used_mib",
    "predicted_peak_mib",
    "launch_s",
    "measure_s",
)


def render_csv(report: Report) -> str:
    """One line a trial, empty where nothing is told. ``kind`` holds for every figure but the predicted."""
    flags = list(dict.fromkeys(flag for trial in report.trials for flag in trial.flags))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(("trial", "kind", "source", "outcome", "feasible", "reason", *_FIGURES, *flags))
    for trial in report.trials:
        figures = _figures(report, trial)
        writer.writerow(
            (
                trial.number,
                report.kind,
                _cell(trial.source),
                trial.outcome,
                str(trial.feasible).lower(),
                _cell(trial.reason or ""),
                *(figures.get(name) for name in _FIGURES),
                *(_cell(words.setting(trial.flags[flag])) if flag in trial.flags else None for flag in flags),
            )
        )
    return text.getvalue()


def _figures(report: Report, trial: TrialRecord) -> dict[str, float | None]:
    time = next((one for one in report.schedule.stretches if one.number == trial.number), None)
    found: dict[str, float | None] = {
        "objective": trial.objective,
        "predicted_peak_mib": trial.predicted.peak_mib if trial.predicted else None,
        "launch_s": round(time.launch_s, 3) if time else None,
        "measure_s": round(time.measure_s, 3) if time else None,
    }
    if trial.measured is not None:
        seen = trial.measured
        found |= {
            "total_tokens_per_s": seen.total_tokens_per_s.median,
            "user_tokens_per_s": seen.user_tokens_per_s.median,
            "ttft_s": seen.ttft_s.median,
            "ttft_p95_s": seen.ttft_p95_s,
            "latency_s": seen.latency_s.median,
            "accept_length": seen.accept_length,
            "vram_used_mib": seen.vram_used_mib,
        }
    return found


def _cell(text: str) -> str:
    """A spreadsheet takes what begins like this for a formula, which a record must not bring in."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text

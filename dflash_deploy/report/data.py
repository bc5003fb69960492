"""The report as one JSON object (docs/json.md)."""

from __future__ import annotations

from pydantic_core import to_json

from dflash_deploy.report.contents import Report
from dflash_deploy.report.verdict import verdict
from dflash_deploy.tune.screen import GOAL_UNITS
from dflash_deploy.tune.summary import short


def render_json(report: Report) -> str:
    """The object, with the keys that docs/json.md describes."""
    study = report.study
    goal = study.profile.objective.optimize
    memory = report.memory
    content = {
        "schema_version": 1,
        "study": study.name,
        "folder": report.folder,
        "state": report.state,
        "simulated": study.simulated,
        "kind": report.kind,
        "verdict": verdict(report),
        "created": study.created,
        "made": report.made,
        "versions": {
            "engine": study.engine_version,
            "tuned_with": study.tool_version,
            "report": report.made_by,
        },
        "card": study.card,
        "seed": study.seed,
        "profile": study.profile,
        "objective": {"goal": goal, "unit": GOAL_UNITS[goal]},
        "best": report.best,
        "baselines": report.baselines,
        "reasons": dict(report.reasons),
        "proof": report.proof,
        "repeated": report.repeated,
        "limits": report.limits,
        "pareto": report.spots,
        "timeline": report.schedule.stretches,
        "between_s": report.schedule.between_s,
        "memory": {
            "total_mib": memory.total_mib,
            "peaks": memory.peaks,
            "predicted_mib": memory.predicted,
            "observed_mib": memory.observed,
        },
        "importance": {
            "trials": report.importance.trials,
            "problem": report.importance.problem,
            "weights": report.importance.weights,
        },
        "failures": report.failures,
        "trials": [short(trial) for trial in report.trials],
    }
    return to_json(content, indent=2).decode() + "\n"

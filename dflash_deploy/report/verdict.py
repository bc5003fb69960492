"""A study in one sentence."""

from __future__ import annotations

from collections import Counter

from dflash_deploy.report.contents import Report
from dflash_deploy.tune.screen import figure
from dflash_deploy.tune.summary import Baseline, again_words, versus


def verdict(report: Report) -> str:
    """What to do now, and on what evidence."""
    launches = len(report.launched)
    if report.best is None:
        if not launches:
            return "No trial has ended yet, so there is nothing to say."
        causes = Counter(failure.reason for failure in report.failures for _ in failure.trials)
        most = f"; most often: {causes.most_common(1)[0][0]}" if causes else ""
        return f"No configuration served within the limits in {_count(launches)}{most}."
    best = report.best
    so_far = "So far, " if report.state == "running" else ""
    value = figure(report.study, best.objective)
    own = next((one for one in report.baselines if one.trial == best.trial), None)
    if own is not None:
        others = f"; nothing else in {_count(launches)} is distinguishably better" if launches > 1 else ""
        return _sentence(f"{so_far}keep {own.name}: {value}{others}")
    against = next((words for one in report.baselines if (words := _against(report, one))), "")
    if not against and report.baselines:
        against = f", where {report.baselines[0].name} did not serve"
    return _sentence(f"{so_far}take trial {best.trial}, the best of {_count(launches)}: {value}{against}")


def _against(report: Report, baseline: Baseline) -> str | None:
    if baseline.gain is None:
        return None
    goal = report.study.profile.objective.optimize
    return f", {versus(baseline.gain, baseline.name, goal)}{again_words(baseline)}"


def _count(launches: int) -> str:
    return f"{launches} launch{'es' if launches != 1 else ''}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."

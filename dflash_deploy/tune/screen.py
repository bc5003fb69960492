"""What a person sees while a study runs: a live table on a terminal, a line for each event elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.profile.schema import FlagSetting, Goal
from dflash_deploy.tune.gain import better_by
from dflash_deploy.tune.outlook import Outlook, duration, time_left_s
from dflash_deploy.tune.records import Candidate, StudyRecord, TrialRecord
from dflash_deploy.tune.select import best_trial
from dflash_deploy.tune.space import Settings

GOAL_UNITS: dict[Goal, str] = {
    "total_tokens_per_s": "tokens/s in all",
    "user_tokens_per_s": "tokens/s a user",
    "latency_s": "s an answer",
    "context_tokens": "tokens of context a user",
}

_ROWS = 24
_COUNT = re.compile(r"(\d+)/(\d+)$")
_LONGEST_COUNT = 10
_BAR_WIDTH = 48


@contextmanager
def _showing() -> Iterator[None]:
    """Say what it means when nothing can be shown any more.

    Raises:
        DeployError: the disk is full, the terminal is gone.
        BrokenPipeError: the reader of a pipe has left, and knows.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise DeployError(
            f"progress cannot be shown: {error.strerror or error}; what had ended until then is kept",
            fix="dflash-deploy tune --resume",
            exit_code=ExitCode.UNAVAILABLE,
        ) from error


class Screen(Protocol):
    """Told of everything that happens in a study."""

    def note(self, text: str) -> None:
        """Something about the study as a whole."""

    def begun(self, candidate: Candidate, outlook: Outlook) -> None:
        """A trial begins."""

    def stage(self, text: str) -> None:
        """Where the running trial stands."""

    def ended(self, record: TrialRecord) -> None:
        """A trial has ended."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def screen_for(stream: TextIO | None, study: StudyRecord, trials: Sequence[TrialRecord]) -> Screen:
    """A live table on a terminal, plain lines elsewhere, nothing where the stream is closed."""
    if stream is not None and stream.isatty():
        return LiveScreen(Console(file=stream), study, trials)
    return PlainScreen(stream, study, trials)


class PlainScreen:
    """One line an event, without colour."""

    def __init__(self, stream: TextIO | None, study: StudyRecord, trials: Sequence[TrialRecord]) -> None:
        self._stream = stream
        self._study = study
        self._trials = list(trials)
        self._number = 0

    def note(self, text: str) -> None:
        """Print it."""
        if self._stream is not None:
            with _showing():
                print(text, file=self._stream, flush=True)

    def begun(self, candidate: Candidate, outlook: Outlook) -> None:
        """Print what is tried and why, and what lies ahead."""
        self._number = candidate.number
        self.note(f"trial {candidate.number}: {candidate.source}: {searched(self._study, candidate.flags)}")
        self.note(f"trial {candidate.number}:   why: {outlook.why}; next: {outlook.after}")
        self.note(f"progress: {ahead(outlook, self._trials)}")

    def stage(self, text: str) -> None:
        """Print it, indented; of a long count only the ends."""
        count = _COUNT.search(text)
        if count and int(count[2]) > _LONGEST_COUNT and count[1] not in ("1", count[2]):
            return
        self.note(f"trial {self._number}:   {text}")

    def ended(self, record: TrialRecord) -> None:
        """Print the outcome, and the best so far."""
        _add(self._trials, record)
        self.note(f"trial {record.number}: {outcome_line(self._study, record)}")
        best = best_trial(self._study, self._trials)
        if best is not None:
            told = f"best so far: trial {best.number}, {figure(self._study, best.objective)}"
            if _reads_better(self._study, record, best):
                told += f"; trial {record.number} is not surely better"
            self.note(told)

    def __enter__(self) -> Self:
        """Nothing to prepare."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to end."""


class LiveScreen:
    """A table that grows, with the running trial's stage below it."""

    def __init__(self, console: Console, study: StudyRecord, trials: Sequence[TrialRecord]) -> None:
        self._study = study
        self._trials = list(trials)
        self._running: Candidate | None = None
        self._stage = ""
        self._outlook: Outlook | None = None
        # Drawn when something happens and never in between: drawing takes time from streams being timed.
        self._live = Live(console=console, auto_refresh=False, get_renderable=self._render)

    def note(self, text: str) -> None:
        """Print it above the table."""
        with _showing():
            self._live.console.print(Text(text))

    def begun(self, candidate: Candidate, outlook: Outlook) -> None:
        """Show it as running, and what lies ahead."""
        self._running, self._stage, self._outlook = candidate, "launching", outlook
        self._draw()

    def stage(self, text: str) -> None:
        """Show it beside the running trial."""
        self._stage = text
        self._draw()

    def ended(self, record: TrialRecord) -> None:
        """Add it to the table."""
        self._running = None
        _add(self._trials, record)
        self._draw()

    def __enter__(self) -> Self:
        """Start drawing."""
        with _showing():
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Draw a last time and leave the table standing."""
        self._running = None
        with _showing():
            self._live.stop()

    def _draw(self) -> None:
        with _showing():
            self._live.refresh()

    def _render(self) -> Group:
        kind = "simulated" if self._study.simulated else "measured"
        goal = self._study.profile.objective.optimize
        title = Text(f"{self._study.name} ({kind})")
        table = Table(title=title, title_justify="left", expand=True, box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("trial", justify="right")
        table.add_column("outcome")
        table.add_column(f"{GOAL_UNITS[goal]} ({kind})", justify="right")
        table.add_column("configuration", ratio=1, no_wrap=True, overflow="ellipsis")
        best = best_trial(self._study, self._trials)
        launched = [trial for trial in self._trials if trial.launched]
        refused = len(self._trials) - len(launched)
        hidden = max(0, len(launched) - _ROWS)
        first = launched[0] if launched else None
        for trial in launched[hidden:]:
            is_best = best is not None and trial.number == best.number
            table.add_row(
                str(trial.number),
                Text(trial.outcome, style="green" if trial.feasible else "yellow"),
                "" if trial.objective is None else f"{trial.objective:.2f}",
                Text(trial.reason or f"{trial.source}: {_beside(self._study, trial, first)}"),
                style="bold" if is_best else "",
            )
        lines: list[RenderableType] = [table]
        if hidden:
            lines.insert(0, Text(f"{hidden} earlier trials are not shown"))
        if refused:
            lines.append(Text(f"{refused} more were refused by the plan before a launch"))
        if best is not None:
            lines.append(Text(f"best so far: trial {best.number}, {figure(self._study, best.objective)}"))
        if self._running is not None:
            lines.append(Text(f"trial {self._running.number} ({self._running.source}): {self._stage}"))
            if self._outlook is not None:
                lines.append(Text(f"why: {self._outlook.why}", style="dim"))
                lines.append(Text(f"next: {self._outlook.after}", style="dim"))
                done = _BAR_WIDTH * self._outlook.launched // max(1, self._outlook.trials)
                bar = Text.assemble(("━" * done, "green"), ("━" * (_BAR_WIDTH - done), "dim"))
                lines += [bar, Text(ahead(self._outlook, self._trials))]
        return Group(*lines)


def ahead(outlook: Outlook, trials: Sequence[TrialRecord]) -> str:
    """How far a study has come as a trial begins, and how long it still takes."""
    left_s = time_left_s(outlook, trials)
    about = f"; about {duration(left_s)} left (predicted from the trials so far)" if left_s else ""
    return f"launch {outlook.launched + 1} of at most {outlook.trials}{about}"


def _add(trials: list[TrialRecord], record: TrialRecord) -> None:
    """Who looks on from another process may find a record on disk before being told that its trial ended."""
    if all(trial.number != record.number for trial in trials):
        trials.append(record)


def outcome_line(study: StudyRecord, record: TrialRecord) -> str:
    """How a trial ended, in one line."""
    parts: list[str] = [str(record.outcome)]
    if record.objective is not None:
        parts.append(figure(study, record.objective))
    if record.reason:
        parts.append(record.reason)
    return ", ".join(parts)


def _reads_better(study: StudyRecord, trial: TrialRecord, than: TrialRecord) -> bool:
    if not trial.feasible or trial.objective is None or than.objective is None:
        return False
    return better_by(trial.objective, than.objective, study.profile.objective.optimize) > 0


def figure(study: StudyRecord, value: float | None) -> str:
    """A value of the study's objective with its unit and its kind."""
    if value is None:
        return "not measured"
    kind = "simulated" if study.simulated else "measured"
    return f"{value:.2f} {GOAL_UNITS[study.profile.objective.optimize]} ({kind})"


def searched(study: StudyRecord, flags: Settings) -> str:
    """The flags that the study varies, with their values here."""
    parts = [f"{name}={_short(flags[name])}" for name in study.profile.search if name in flags]
    return " ".join(parts) or "nothing but the fixed flags"


def _beside(study: StudyRecord, trial: TrialRecord, first: TrialRecord | None) -> str:
    """What differs from the study's first trial; all of it for that one."""
    if first is None or trial.number == first.number:
        return searched(study, trial.flags)
    changed = [name for name in study.profile.search if trial.flags.get(name) != first.flags.get(name)]
    parts = [
        f"{name}={_short(trial.flags[name])}" if name in trial.flags else f"no {name}" for name in changed
    ]
    return " ".join(parts) or f"as trial {first.number}"


def _short(value: FlagSetting) -> str:
    if isinstance(value, list):
        return ",".join(str(item) for item in value)
    return "on" if value is True else "off" if value is False else str(value)

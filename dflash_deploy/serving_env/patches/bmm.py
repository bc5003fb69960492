"""Which FlashInfer back end is best for per-tensor FP8 layers here, as ``inside/bmm_probe.py`` measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import read_regular
from dflash_deploy.serving_env.refused import refused

DEFAULT = "cublas"
STALL_S = 0.2
"""A call that takes longer for a number of rows not seen before stops a server for everyone's eyes: published
stalls of cuDNN's plans begin here."""
WORTH_WHILE = 0.97
"""Share of the default's time that another back end must stay below to be worth a change."""
CUDNN_ALIGNED = (9, 23, 1)
"""First cuDNN without the misaligned-address errors in this product."""
_MOST_BYTES = 16 << 20
_OF_CUDNN = frozenset({"cudnn", "auto"})
"""Back ends that give the product to cuDNN, or may."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Call(_Record):
    """One product of M rows with a K x N weight."""

    m: int
    k: int
    n: int
    first_s: float = Field(ge=0, allow_inf_nan=False)
    """The first call with this shape."""
    steady_s: float = Field(ge=0, allow_inf_nan=False)
    """Later calls, the median."""
    relative_error: float = Field(ge=0, allow_inf_nan=False)
    """Against a float reference, root mean square."""
    correct: bool


class BackendReport(_Record):
    """What became of one back end, in a process of its own."""

    backend: str
    outcome: str
    """``works``, ``fails``, ``wrong``, ``stalls`` (cut off) or ``absent`` (it takes none of these here)."""
    message: str | None = None
    calls: tuple[Call, ...] = ()


class ProbeReport(_Record):
    """One run of the probe."""

    schema_version: int
    measured: bool
    """False where there is no CUDA device; nothing was tried then."""
    problem: str | None = None
    device: str | None = None
    torch: str | None = None
    flashinfer: str | None = None
    sglang: str | None = None
    cuda: str | None = None
    driver: str | None = None
    cudnn: str | None = None
    backends: tuple[BackendReport, ...] = ()


@dataclass(frozen=True)
class Decision:
    """What to do.

    Attributes:
        decided: a probe has run on this machine, or a person has chosen.
        backend: to be used instead of the default, or None to leave it.
        reason: why, in a sentence.
        evidence: what was measured, a line for each back end.
        fix: what else would help, or None.
    """

    decided: bool
    backend: str | None
    reason: str
    evidence: tuple[str, ...] = ()
    fix: str | None = None


def by_hand(backend: str) -> Decision:
    """A person's own choice, without a measurement."""
    return Decision(True, backend, f"{backend} was chosen by hand, not by a measurement")


def to_measure() -> Decision:
    """The default stays what a server takes; its variable names another where one is to be measured."""
    return Decision(True, DEFAULT, f"{DEFAULT} stays, until a server's variable names another back end")


def unusable(report: ProbeReport) -> dict[str, str]:
    """Back ends that a probe tried and that no server is to be given, each with the reason."""
    old = _old_cudnn(report.cudnn)
    found = {one.backend: _in_words(one) for one in report.backends if one.outcome != "works"}
    for one in report.backends:
        if old and one.backend in _OF_CUDNN:
            found.setdefault(one.backend, f"cuDNN {report.cudnn} raised misaligned-address errors")
    return found


def read_report(content: bytes | str, source: str) -> ProbeReport:
    """A probe's record.

    Raises:
        DeployError: it is none.
    """
    try:
        return ProbeReport.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise DeployError(
            f"{source}: not a record of the FP8 probe: {where}: {first['msg']}",
            exit_code=ExitCode.INVALID_INPUT,
        ) from error


def read_report_file(path: Path) -> ProbeReport:
    """A probe's record in a file.

    Raises:
        DeployError: there is no such file, or it is no record.
    """
    try:
        content = read_regular(path, most_bytes=_MOST_BYTES)
    except FileNotFoundError as error:
        raise DeployError(
            f"{path}: there is no such record",
            fix="dflash-deploy patch measure --out FILE makes one, on the machine that serves",
            exit_code=ExitCode.MISSING,
        ) from error
    except OSError as error:
        raise refused(error, path) from error
    return read_report(content, str(path))


def decide(report: ProbeReport, *, choices: Sequence[str] = ("cudnn", "cutlass", "auto")) -> Decision:
    """Leave the default where it works and nothing beats it.

    Where it works, another takes its place only if it is right, quicker in steady use by a margin, and does
    not stall on a number of rows that it has not seen. Where it fails, the best of those that work does, one
    that stalls being better than none. cuDNN before 9.23.1 is never taken.
    """
    if not report.measured:
        return Decision(decided=False, backend=None, reason=report.problem or "nothing was measured")
    reports = {one.backend: one for one in report.backends}
    evidence = tuple(describe(one) for one in report.backends)
    default = reports.get(DEFAULT)
    if default is None:
        return Decision(
            decided=False,
            backend=None,
            reason=f"the probe did not try {DEFAULT}, SGLang's default",
            evidence=evidence,
        )
    broken = unusable(report)
    usable = {name: one for name, one in reports.items() if name in choices and name not in broken}
    fix = (
        f"install cuDNN 9.23.1 or newer: {report.cudnn} raised misaligned-address errors, so it is left out"
        if _old_cudnn(report.cudnn) and not _OF_CUDNN.isdisjoint(reports)
        else None
    )
    if default.outcome == "works":
        return _beaten(default, usable, evidence)
    reason = f"{DEFAULT}, the default, {_in_words(default)}"
    if not usable:
        return Decision(True, None, f"{reason}, and no other back end can be taken instead", evidence, fix)
    best = min(usable.values(), key=lambda one: (_stalls(one), _steady_s(one)))
    reason = f"{reason}; {best.backend} works"
    if _stalls(best):
        reason += f", though a new number of rows takes it up to {_worst_new_shape_s(best):.1f} s (measured)"
    return Decision(True, best.backend, reason, evidence, fix)


def describe(report: BackendReport) -> str:
    """One back end's line, its figures measured."""
    if report.outcome != "works":
        return f"{report.backend} {_in_words(report)}"
    return (
        f"{report.backend} works: {_steady_s(report) * 1e6:.0f} µs for all shapes together, a new number of "
        f"rows up to {_worst_new_shape_s(report) * 1e3:.0f} ms (measured)"
    )


def _beaten(
    default: BackendReport, usable: Mapping[str, BackendReport], evidence: tuple[str, ...]
) -> Decision:
    same = [one for one in usable.values() if _shapes(one) == _shapes(default)]
    quicker = [one for one in same if _steady_s(one) < WORTH_WHILE * _steady_s(default)]
    steady = [one for one in quicker if not _stalls(one)]
    if steady:
        best = min(steady, key=_steady_s)
        share = _steady_s(best) / _steady_s(default)
        return Decision(
            True,
            best.backend,
            f"{best.backend} takes {share:.0%} of {DEFAULT}'s time here (measured)",
            evidence,
        )
    if quicker:
        stalling = ", ".join(f"{one.backend} up to {_worst_new_shape_s(one):.1f} s" for one in quicker)
        reason = f"{DEFAULT} works; what is quicker stalls on each new number of rows: {stalling} (measured)"
        return Decision(True, None, reason, evidence)
    return Decision(
        True, None, f"{DEFAULT}, the default, works and nothing beats it here (measured)", evidence
    )


def _shapes(report: BackendReport) -> set[tuple[int, int, int]]:
    return {(call.m, call.k, call.n) for call in report.calls}


def _steady_s(report: BackendReport) -> float:
    return sum(call.steady_s for call in report.calls)


def _worst_new_shape_s(report: BackendReport) -> float:
    """The longest first call of a shape, without the very first, in which libraries are loaded."""
    return max((call.first_s for call in report.calls[1:]), default=0.0)


def _stalls(report: BackendReport) -> bool:
    return _worst_new_shape_s(report) >= STALL_S


def _in_words(report: BackendReport) -> str:
    message = f" ({report.message})" if report.message else ""
    match report.outcome:
        case "stalls":
            return f"stalls{message}"
        case "wrong":
            worst = max((call.relative_error for call in report.calls), default=0.0)
            return f"gives wrong results{message}, off by {worst:.2g} (measured)"
        case "fails":
            return f"fails{message}"
        case "absent":
            return f"is not here{message}"
        case _:
            median_s = statistics.median(call.steady_s for call in report.calls) if report.calls else 0.0
            return f"works, {median_s * 1e6:.0f} µs a call (measured)"


def _old_cudnn(version: str | None) -> bool:
    if version is None:
        return False
    parts = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    return len(parts) == 3 and parts < CUDNN_ALIGNED

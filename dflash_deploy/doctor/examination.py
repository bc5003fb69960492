"""All checks, run side by side: none can hang the others, and none can end them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_deploy.doctor import cuda, disks, environment, gpu, host, hub, model, planned, proxy, service
from dflash_deploy.doctor.finding import Answer, Finding, NotCheckedError, Status, failed, unknown
from dflash_deploy.doctor.repair import Done
from dflash_deploy.doctor.subject import Subject
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.machine.text import printable
from dflash_deploy.serving_env.refused import refused

_QUICK_S = 15.0
_UNITS_S = 40.0
_ENVIRONMENT_S = 30.0
_IMPORTS_S = 600.0
_HASHES_S = 3600.0


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        title: names it where it passes.
        run: gives None where the check says nothing here, such as one of WSL outside of it.
        limit_s: longest wait for it.
        deep_s: the same when packages are imported.
    """

    id: str
    group: str
    title: str
    run: Callable[[Subject], Answer | None]
    limit_s: float = _QUICK_S
    deep_s: float | None = None


def _engine_check(id_: str, title: str, run: Callable[[Subject], Answer | None]) -> Check:
    return Check(id_, "environment", title, run, _ENVIRONMENT_S, _IMPORTS_S)


CHECKS: tuple[Check, ...] = (
    # The first that looks at the host, so that it tells where that cannot be read.
    Check("memory", "host", "RAM", host.memory),
    Check("driver", "gpu", "driver and cards", gpu.driver),
    Check("cuda-start", "gpu", "CUDA's library", cuda.starts),
    Check("visible", "gpu", "visible cards", gpu.visible),
    Check("vram", "gpu", "free VRAM", gpu.vram, _UNITS_S),
    Check("clocks", "gpu", "clocks", gpu.clocks),
    Check("power", "gpu", "power limit", gpu.power),
    Check("pcie", "gpu", "PCIe link", gpu.pcie),
    Check("persistence", "gpu", "persistence mode", gpu.persistence),
    _engine_check("engine", "SGLang", environment.release),
    _engine_check("cuda", "driver and CUDA", environment.cuda),
    _engine_check("architecture", "torch for this card", environment.architecture),
    _engine_check("kernels", "SGLang's kernels", environment.kernels),
    _engine_check("flashinfer", "FlashInfer", environment.flashinfer),
    _engine_check("toolkit", "nvcc and ninja", environment.toolkit),
    _engine_check("compiler", "compiler and Python.h", environment.compiler),
    _engine_check("cudnn", "cuDNN", environment.cudnn),
    _engine_check("glibc", "glibc", environment.glibc),
    _engine_check("pins", "package versions", environment.pins),
    Check("patches", "environment", "patches", service.patches),
    Check("half-made", "environment", "environments", environment.half_made),
    Check("disk-models", "host", "disk for weights", disks.models),
    Check("disk-caches", "host", "disk for caches", disks.caches),
    Check("folders", "host", "folders", disks.folders),
    Check("shared-memory", "host", "shared memory", host.shared_memory),
    Check("limits", "host", "ulimits", host.limits),
    Check("memory-guard", "host", "earlyoom", host.guard),
    Check("wsl", "host", "WSL", host.wsl),
    Check("clock", "host", "clock", host.clock),
    Check("hub-token", "hub", "HF token", hub.token),
    Check("hub-offline", "hub", "offline mode", hub.offline),
    Check("target", "model", "target", model.target),
    Check("draft", "model", "draft", model.draft),
    Check("files", "model", "files of the checkpoints", model.whole),
    Check("hashes", "model", "hashes of the checkpoints", model.content, _HASHES_S),
    Check("draft-match", "model", "draft for this target", model.belong_together),
    Check("card", "profile", "card of the profile", planned.card),
    Check("flags", "profile", "flags", planned.flags, _ENVIRONMENT_S, _IMPORTS_S),
    Check("plan", "profile", "VRAM plan", planned.budget, _UNITS_S, _IMPORTS_S),
    Check("proxy", "service", "proxy", proxy.usable),
    Check("port", "service", "port", service.port, _UNITS_S),
    Check("services", "service", "services", service.units, _UNITS_S),
    Check("left-behind", "service", "servers left behind", service.left_behind),
)


def examine(
    subject: Subject, *, only: Collection[str] | None = None, checks: tuple[Check, ...] = CHECKS
) -> tuple[Finding, ...]:
    """Run the checks.

    Args:
        subject: what is looked at.
        only: ids of the checks to run; None for all.
        checks: the checks there are.

    Returns:
        A finding for each check that has something to say here, in the order of the checks.
    """
    chosen = [check for check in checks if only is None or check.id in only]
    answers: list[Answer | None] = [unknown(f"no answer within {_limit_s(c, subject):g} s") for c in chosen]
    began = time.monotonic()
    threads = []
    for place, check in enumerate(chosen):
        # A check that hangs is left behind in a thread that does not keep the program from ending.
        thread = threading.Thread(target=_run, args=(check, subject, answers, place), daemon=True)
        thread.start()
        threads.append(thread)
    for thread, check in zip(threads, chosen, strict=True):
        thread.join(max(0.0, began + _limit_s(check, subject) - time.monotonic()))
    # What comes late must not change what is told already.
    return _told_once(
        Finding(check.id, check.group, check.title, answer)
        for check, answer in zip(chosen, list(answers), strict=True)
        if answer is not None
    )


def _told_once(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """A fact that could not be had keeps several checks from looking; the first of them says why."""
    first: dict[tuple[str, str | None], str] = {}
    told = []
    for finding in findings:
        answer = finding.answer
        if answer.status is Status.FAIL:
            tells = first.setdefault((answer.text, answer.fix), finding.id)
            if tells != finding.id:
                told.append(replace(finding, answer=_not_checked(tells)))
                continue
        told.append(finding)
    return tuple(told)


def _not_checked(waits_for: str) -> Answer:
    return Answer(Status.UNKNOWN, f"not checked: see {waits_for}", waits_for=waits_for)


def exit_code(findings: tuple[Finding, ...], repairs: Collection[Done] = ()) -> ExitCode:
    """What the command ends with."""
    statuses = {finding.status for finding in findings}
    if Status.FAIL in statuses or any(done.outcome == "failed" for done in repairs):
        return ExitCode.FAILED
    return ExitCode.MISSING if statuses <= {Status.UNKNOWN} else ExitCode.OK


def _run(check: Check, subject: Subject, answers: list[Answer | None], place: int) -> None:
    try:
        answers[place] = check.run(subject)
    except NotCheckedError as error:
        answers[place] = _not_checked(error.waits_for)
    except DeployError as error:
        answers[place] = failed(error.message, error.fix)
    except OSError as error:
        told = refused(error, Path())
        answers[place] = failed(told.message, told.fix)
    except Exception as error:  # noqa: BLE001 - whatever goes wrong in one check is told, and ends no other
        answers[place] = unknown(
            f"the check itself failed: {type(error).__name__}: {printable(str(error), longest=300)}"
        )


def _limit_s(check: Check, subject: Subject) -> float:
    deep = subject.request.deep and check.deep_s is not None
    return check.deep_s if deep and check.deep_s is not None else check.limit_s

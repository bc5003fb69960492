"""Checks of what is deployed and running: services, servers that were left behind, patches, the port."""

from __future__ import annotations

import shutil

from dflash_deploy.doctor.finding import Answer, NotCheckedError, Repair, Status, failed, passed, warned
from dflash_deploy.doctor.subject import Subject
from dflash_deploy.errors import DeployError
from dflash_deploy.server.orphans import end_orphans
from dflash_deploy.server.ports import require_free
from dflash_deploy.server.processes import alive, boot_id, members, pid_namespace
from dflash_deploy.server.records import ServerRecord, read_records
from dflash_deploy.serving_env.patches.description import load_patch, patch_names
from dflash_deploy.serving_env.patches.operations import mend, unfinished
from dflash_deploy.serving_env.patches.tree import Tree
from dflash_deploy.serving_env.patches.verdict import Verdict, VerdictKind, examine
from dflash_deploy.watch.places import address, record_places, unit_places
from dflash_deploy.watch.recorded import recorded
from dflash_deploy.watch.units import UnitState

_HOST, _PORT = "127.0.0.1", 30000
_RESTARTS = 3
_GONE = "is not there any more"
_HEAD_PATCH = "nvfp4-lm-head"


def port(subject: Subject) -> Answer:
    """The port is free. An engine finds a taken one only after loading the model, and then hangs."""
    service = subject.profile.service if subject.profile else None
    host, number = (service.host, service.port) if service else (_HOST, _PORT)
    try:
        require_free(host, number)
    except DeployError as error:
        places = (*unit_places(subject.units()), *record_places())
        ours = next((place for place in places if place.base_url == address(host, number)), None)
        if ours is not None:
            return passed(f"port {number} on {host} is used by {ours.name}, a server of this tool")
        made = failed if service else warned
        return made(error.message, error.fix, "bind(2)")
    return passed(f"port {number} on {host} is free", "bind(2)")


def units(subject: Subject) -> Answer | None:
    """Services of this tool run, or were stopped on purpose."""
    if shutil.which("systemctl") is None:
        return None
    found = subject.units()
    answer = judge_units(found)
    if answer.status is not Status.PASS:
        return answer
    known = {unit: known.stale for unit in found if (known := recorded(unit)) is not None}
    gone = {unit: lost for unit, stale in known.items() if (lost := [one for one in stale if _GONE in one])}
    if gone:
        return warned(
            "; ".join(f"{unit.name}: {', '.join(lost)}" for unit, lost in gone.items()),
            "; ".join(
                f"put it back, or install anew: dflash-deploy service show {one.service}" for one in gone
            ),
            "what its generation was installed with",
        )
    return answer


def judge_units(found: tuple[UnitState, ...]) -> Answer:
    """What the states of services mean."""
    if not found:
        return passed("no service is installed")
    broken = [unit for unit in found if unit.active == "failed" or unit.sub == "auto-restart"]
    restless = [unit for unit in found if unit.restarts >= _RESTARTS and unit not in broken]
    if broken or restless:
        told = [
            f"{unit.name} {'failed' if unit.active == 'failed' else 'is started again and again'} "
            f"({unit.result})"
            for unit in broken
        ]
        told += [f"{unit.name} was restarted {unit.restarts} times" for unit in restless]
        fixes = [f"dflash-deploy diagnose --unit {unit.name}" for unit in (*broken, *restless)]
        return (failed if broken else warned)("; ".join(told), "; ".join(fixes), "systemctl show")
    return passed(", ".join(f"{unit.name} {unit.active} ({unit.sub})" for unit in found), "systemctl show")


def left_behind(_: Subject) -> Answer:
    """No server outlived the run of the tool that started it, and no record outlived its server."""
    dead, orphaned, ours = [], [], 0
    for record in read_records():
        if record.boot_id == boot_id() and (record.pid_namespace != pid_namespace() or alive(record.tool)):
            ours += 1
        elif record.boot_id == boot_id() and _still_runs(record):
            orphaned.append(record)
        else:
            dead.append(record)
    if not dead and not orphaned:
        return passed(f"{ours} server{'' if ours == 1 else 's'} of a running command" if ours else "nothing")
    told = [f"port {one.port} (process {one.server.pid if one.server else '?'})" for one in orphaned]
    parts = [f"servers still run whose command is gone: {', '.join(told)}"] if orphaned else []
    if dead:
        parts.append(f"{len(dead)} record{'' if len(dead) == 1 else 's'} of servers that are gone")
    what = [f"end the server{'' if len(orphaned) == 1 else 's'} on {', '.join(told)}"] if orphaned else []
    what += (
        [f"remove {len(dead)} stale record{'' if len(dead) == 1 else 's'} and temporary folders"]
        if dead
        else []
    )
    return warned(
        "; ".join(parts),
        "dflash-deploy doctor --fix",
        *(f"log: {one.run_dir}" for one in orphaned),
        repair=Repair(" and ".join(what), _end_left_behind),
    )


def patches(subject: Subject) -> Answer:
    """Patches that this SGLang needs are applied, and applied ones are as they were written."""
    try:
        tree = subject.tree()
    except DeployError:
        raise NotCheckedError("engine") from None
    cut_short = unfinished(tree)
    if cut_short:
        return failed(
            "; ".join(cut_short),
            f"dflash-deploy patch check --env {tree.quoted}",
            repair=Repair("put the file back that a patch was cut short in", lambda: _mend(tree)),
        )
    verdicts = [examine(load_patch(name), tree).verdict for name in patch_names()]
    open_ones = [one for one in verdicts if _status(subject, one) is not Status.PASS]
    told = tuple(f"{one.patch}: {one.kind}: {one.reason}" for one in verdicts)
    if not open_ones:
        return passed("; ".join(f"{one.patch} {one.kind}" for one in verdicts), *told)
    worst = min((_status(subject, one) for one in open_ones), key=lambda status: status.rank)
    return Answer(
        worst,
        "; ".join(f"{one.patch} is {one.kind}: {one.reason}" for one in open_ones),
        "; ".join(one.fix or f"dflash-deploy patch check {one.patch}" for one in open_ones),
        told,
    )


def _status(subject: Subject, verdict: Verdict) -> Status:
    if verdict.kind is VerdictKind.NEEDED:
        # Without its patch, this pair of target and draft is refused by the engine.
        head = verdict.patch == _HEAD_PATCH and subject.profile is not None and _has_packed_head(subject)
        return Status.FAIL if head else Status.WARN
    if verdict.stale or verdict.kind in (VerdictKind.DRIFTED, VerdictKind.FILE_MISSING):
        return Status.WARN
    return Status.PASS


def _has_packed_head(subject: Subject) -> bool:
    target, draft = subject.target(), subject.draft()
    drafted = draft is not None and draft.card is not None and draft.card.architecture == "DFlash2DraftModel"
    return drafted and target is not None and target.card is not None and target.card.lm_head == "fp4"


def _still_runs(record: ServerRecord) -> bool:
    return record.server is not None and bool(members(record.server, record.token, record.children))


def _end_left_behind() -> str:
    return "; ".join(end_orphans()) or "removed what was stale"


def _mend(tree: Tree) -> str:
    return "; ".join(mend(tree)) or "nothing was unfinished any more"

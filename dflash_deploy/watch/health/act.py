"""What follows from a check: a restart after enough evidence, and word of it to whoever wants it."""

from __future__ import annotations

import time

from dflash_deploy.deploy import notify as notifying
from dflash_deploy.deploy.generations import Store, root_of
from dflash_deploy.watch import history, units
from dflash_deploy.watch.health import evidence
from dflash_deploy.watch.health.notices import Notice, notices
from dflash_deploy.watch.health.verdict import Health
from dflash_deploy.watch.recorded import installed
from dflash_deploy.watch.units import UnitState


def act(unit: UnitState, seen: Health, policy: evidence.Policy) -> tuple[str, ...]:
    """Weigh the evidence, write it down, restart if it is enough, tell of it; what was done, in sentences.

    Nothing is done, and nothing counted, while a command changes the service.

    Raises:
        DeployError: another check acts on the same service right now, or its state cannot be written.
    """
    store = Store(root_of(unit.manager) / unit.service, unit.service)
    if (change := store.under_way()) is not None:
        return (f"nothing is done: {change.words} is under way (process {change.process.pid})",)
    known = installed(unit)
    notify = known.notify if known is not None else None
    now_s = time.time()
    with evidence.held(unit.service) as file:
        history.keep(file.with_suffix(".sqlite"), _sample(seen, now_s))
        before = evidence.read(file, unit.service)
        decision = evidence.decide(before, seen, active=unit.active == "active", now_s=now_s, policy=policy)
        state = decision.state
        found: tuple[Notice, ...] = ()
        if notify is not None:
            found, state = notices(before, decision, seen, unit, now_s=now_s, every_s=notify.every_s)
        if state != before:
            evidence.write(file, state)
        said = decision.why
        if decision.restart:
            failed = units.restart(unit)
            said = f"restarting {unit.name}: {said}" if failed is None else f"not restarted: {failed}"
    told = [notifying.message(notice.event, unit.service, notice.why) for notice in found]
    problems = [problem for one in told if notify is not None for problem in notifying.send(notify, one)]
    return (said, *(f"nobody was told: {problem}" for problem in problems))


def _sample(seen: Health, now_s: float) -> history.Sample:
    figures: dict[str, float] = {}
    for layer in seen.layers:
        for figure in layer.figures:
            # Of several cards, the one that has least.
            figures[figure.name] = min(figure.value, figures.get(figure.name, figure.value))
    return history.Sample(
        now_s,
        tokens_per_s=figures.get("generation_throughput"),
        kv_usage=figures.get("kv_usage"),
        accept_length=figures.get("accept_length"),
        vram_free_mib=figures.get("vram_free"),
        running=figures.get("running_requests"),
        simulated=float(seen.simulated),
    )

"""What is told of a service from one check to the next, and how often."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_deploy.deploy.notify import Event
from dflash_deploy.watch.health.evidence import Decision, Sent, State, Told
from dflash_deploy.watch.health.verdict import Health, Verdict
from dflash_deploy.watch.units import UnitState

_HOUR_S = 3600.0
_MOST_AN_HOUR = 12


@dataclass(frozen=True)
class Notice:
    """One thing to tell."""

    event: Event
    why: str


def notices(
    before: State, decision: Decision, health: Health, unit: UnitState, *, now_s: float, every_s: float
) -> tuple[tuple[Notice, ...], State]:
    """What has changed since the last check, and what to remember of it.

    Of one kind at most one is told within ``every_s``, and twelve in an hour. Being down and serving again
    are told later where they could not be told at once; restarts in between are counted.

    Args:
        before: what was remembered before this check.
        decision: what came of this check.
        health: what this check found.
        unit: the service's.
        now_s: seconds since the epoch.
        every_s: shortest time between two of one kind.
    """
    state, told = decision.state, before.told
    sent = tuple(one for one in told.sent if now_s - _HOUR_S < one.at_s <= now_s)
    same_boot = before.boot_id == state.boot_id
    found: list[Notice] = []
    untold = told.untold
    if decision.restart:
        found.append(Notice("restarted", decision.why))
    elif same_boot and unit.restarts > told.restarts:
        how = "" if unit.result == "success" else f" ({unit.result})"
        found.append(Notice("restarted", f"it ended by itself{how}, and systemd started it again"))
    down = _down(decision, health, unit)
    if down is not None and down != told.down and not decision.restart:
        found.append(Notice("down", _why(decision, health, unit)) if down else _RECOVERED)
    kept: list[Notice] = []
    for notice in found:
        again = any(one.event == notice.event and now_s - one.at_s < every_s for one in sent)
        if again or len(sent) >= _MOST_AN_HOUR:
            untold += notice.event == "restarted"
            continue
        if untold:
            notice = Notice(notice.event, f"{notice.why} ({untold} restarts before were not told)")  # noqa: PLW2901
            untold = 0
        kept.append(notice)
        sent = (*sent, Sent(event=notice.event, at_s=now_s))
    is_down = told.down
    if decision.restart:
        is_down = True
    elif any(notice.event in ("down", "recovered") for notice in kept):
        is_down = bool(down)
    remembered = Told(down=is_down, restarts=unit.restarts, sent=sent, untold=untold)
    return tuple(kept), state.model_copy(update={"told": remembered})


_RECOVERED = Notice("recovered", "a check found it well")


def _down(decision: Decision, health: Health, unit: UnitState) -> bool | None:
    """Whether it is down; None where it starts, was stopped, or not enough checks have said so."""
    if unit.active == "failed" or unit.sub == "auto-restart" or decision.enough:
        return True
    if unit.active != "active" or health.starting:
        return None
    return False if health.verdict in (Verdict.OK, Verdict.WARNING) else None


def _why(decision: Decision, health: Health, unit: UnitState) -> str:
    if unit.active != "active":
        return next((layer.text for layer in health.layers if layer.name == "unit"), unit.active)
    return decision.why

"""Waiting for a server that starts: ready, dead, stalled or out of time."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from dflash_deploy.engine.launch import Launch
from dflash_deploy.engine.sglang.bootlog import Progress
from dflash_deploy.engine.sglang.http import healthy
from dflash_deploy.server.deadlines import Deadlines
from dflash_deploy.server.log import ServerLog
from dflash_deploy.server.outcome import NotServed, Served, StartOutcome

_POLL_S = 0.1
_HEALTH_TIMEOUT_S = 25.0  # SGLang itself gives up after 20 s and answers 503
_HEALTH_PAUSE_S = 0.5
_LAST_WORDS_S = 5.0


def wait_until_ready(
    launch: Launch,
    log: ServerLog,
    deadlines: Deadlines,
    *,
    exit_status: Callable[[], int | None],
    stopped: Callable[[], bool],
    on_progress: Callable[[Progress], None] | None,
) -> StartOutcome:
    """Wait until the log says ready *and* ``/health`` answers 200.

    Neither alone is enough: the log cannot tell whether the port was had, and a healthy answer may come
    from somebody else's server.

    Args:
        launch: what was started.
        log: its output.
        deadlines: how long to wait.
        exit_status: how the main process ended, None while it runs.
        stopped: the server was told to stop meanwhile (by a signal handler or another thread).
        on_progress: called at each new stage and detail.
    """
    started = moved = time.monotonic()
    reported: Progress | None = None
    failed: float | None = None
    next_health_check = started

    def elapsed_s() -> float:
        return (time.monotonic() - started) * launch.time_scale

    def not_served(reason: str, status: int | None = None) -> NotServed:
        boot = log.boot
        return NotServed(
            boot, boot.failure.stage if boot.failure else boot.stage, reason, status, elapsed_s()
        )

    while True:
        log.wait(_POLL_S)
        progress, boot, now = log.progress, log.boot, time.monotonic()
        if progress != reported:
            reported, moved = progress, now
            if on_progress:
                on_progress(progress)
        if stopped():
            return not_served("it was stopped while it started", exit_status())
        if (status := exit_status()) is not None:
            log.finish(_LAST_WORDS_S)
            return not_served(_cause(log, status), status)
        if log.problem:
            return not_served(log.problem.message)

        if boot.failure:
            failed = failed or now
            if now - failed > deadlines.linger_s:
                return not_served(boot.failure.message)
        elif boot.ready and now >= next_health_check:
            if healthy(launch.base_url, timeout_s=_HEALTH_TIMEOUT_S):
                return Served(log.boot, elapsed_s())
            next_health_check = time.monotonic() + _HEALTH_PAUSE_S

        silent_s = deadlines.silent_s(progress.stage, launch.time_scale)
        unmoved_s = deadlines.unmoved_s(progress.stage, launch.time_scale)
        whole_s = deadlines.whole_s(launch.time_scale)
        stands = f"in stage {progress.stage}" + (f" ({progress.detail})" if progress.detail else "")
        if boot.ready and now - moved > silent_s:
            return not_served(
                f"it said that it is ready, but /health gave no healthy answer for {silent_s:.0f} s"
            )
        if now - max(moved, log.last_output) > silent_s:
            return not_served(f"stalled {stands}: nothing printed for {silent_s:.0f} s" + _last_line(log))
        if now - moved > unmoved_s:
            return not_served(f"no progress {stands} for {unmoved_s:.0f} s" + _last_line(log))
        if now - started > whole_s:
            return not_served(f"not ready after {whole_s:.0f} s, {stands}" + _last_line(log))


def _cause(log: ServerLog, status: int) -> str:
    if failure := log.boot.failure:
        return failure.message
    if status >= 0:
        return f"it exited with status {status}" + _last_line(log)
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal
        name = f"signal {-status}"
    return f"it was ended by {name}" + _last_line(log)


def _last_line(log: ServerLog) -> str:
    return f"; its last line: {log.last_line}" if log.last_line else ""

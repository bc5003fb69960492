"""``python -m dflash_deploy.simulator <sglang flags>``: see the package for the environment it reads."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from dflash_deploy.engine.sglang.flags import FlagTable
from dflash_deploy.engine.sglang.versions import NEWEST
from dflash_deploy.simulator import logs
from dflash_deploy.simulator.boot import Enter, Pass, SchedulerDiedError, Up, start
from dflash_deploy.simulator.calibration import card_calibration
from dflash_deploy.simulator.faults import Faults, read_faults
from dflash_deploy.simulator.physics.residuals import draw_residuals
from dflash_deploy.simulator.settings import ArgumentsRefusedError, Settings, resolve
from dflash_deploy.simulator.shipped import UnknownNameError, load_card

if TYPE_CHECKING:
    import argparse

_IMPORTS_S = 5.0


class _Clock:
    """Sleeps by schedule, so that what writing the log takes is not added."""

    def __init__(self, time_scale: float) -> None:
        self._scale = time_scale
        self._due = time.monotonic()

    def wait(self, seconds: float) -> None:
        self._due += seconds / self._scale
        time.sleep(max(0.0, self._due - time.monotonic()))


def main() -> int:
    """Play one server; the exit status is SGLang's."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        seed = int(os.environ.get("DFLASH_SIM_SEED", "0"))
        time_scale = float(os.environ.get("DFLASH_SIM_TIME_SCALE", "1"))
        if not math.isfinite(time_scale) or not 0 < time_scale <= 1e6:
            raise ValueError(f"DFLASH_SIM_TIME_SCALE must be a positive number, not {time_scale}")  # noqa: TRY301
        faults = read_faults(os.environ.get("DFLASH_SIM_FAULT", ""))
        card = load_card(os.environ.get("DFLASH_SIM_CARD", "rtx-5090"))
    except (ValueError, UnknownNameError) as problem:
        sys.stderr.write(f"simulator: {problem}\n")
        return 2
    version = os.environ.get("DFLASH_SIM_VERSION", NEWEST)
    args = FlagTable.for_version(version).parser(prog="launch_server.py").parse_args()
    log = logs.Log()
    clock = _Clock(time_scale)
    clock.wait(_IMPORTS_S * faults.slow_start)
    try:
        settings = resolve(args, card=card, version=version)
    except ArgumentsRefusedError as failure:
        log.raw(logs.traceback_of(failure.kind, failure.message, "srt/server_args.py"))
        return 1
    arguments = _resolved(args, settings)
    log.line(f"server_args={arguments}")
    up = _boot(settings, seed, faults, log, clock)
    # Only now: a server that dies while it loads never needs the event loop.
    from dflash_deploy.simulator.server import serve  # noqa: PLC0415

    return serve(up, seed=seed, time_scale=time_scale, faults=faults, arguments=arguments, log=log)


def _boot(settings: Settings, seed: int, faults: Faults, log: logs.Log, clock: _Clock) -> Up:
    """Start, saying each thing in its time; a start that fails does not come back."""
    boot = start(settings, card_calibration(settings.card), draw_residuals(settings.card.id, seed))
    while True:
        try:
            event = next(boot)
        except StopIteration as stop:
            up: Up = stop.value
            return up
        except SchedulerDiedError as failure:
            _die(failure, log, clock)
        if isinstance(event, Pass):
            clock.wait(event.seconds * faults.slow_start)
        elif isinstance(event, Enter):
            if event.stage in faults.hang and event.stage != "warm-up":
                while True:
                    time.sleep(3600)
            if event.stage in faults.die and event.stage != "warm-up":
                message = f"injected failure in stage {event.stage}"
                _die(SchedulerDiedError(event.stage, "RuntimeError", message), log, clock)
        elif event.raw:
            log.raw(event.text)
        else:
            log.line(event.text)


def _die(failure: SchedulerDiedError, log: logs.Log, clock: _Clock) -> NoReturn:
    if failure.kind:
        trace = logs.traceback_of(failure.kind, failure.message, "srt/managers/scheduler.py")
        log.line(f"Scheduler hit an exception: {trace}")
        log.line("Received sigquit from a child process. It usually means the child failed.")
    else:
        log.line(
            f"Rank 0 scheduler died during initialization (exit code: {failure.exit_code}). If exit code "
            "is -9 "
            "(SIGKILL), a common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check."
        )
    clock.wait(5.0)
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(137)


def _resolved(args: argparse.Namespace, settings: Settings) -> dict[str, object]:
    """The arguments with defaults filled in, as SGLang prints and serves them."""
    speculation = settings.speculation
    resolved = {key: _plain(value) for key, value in vars(args).items()}
    resolved |= {
        "served_model_name": settings.served_model_name,
        "mem_fraction_static": settings.mem_fraction_static,
        "chunked_prefill_size": settings.chunked_prefill_size,
        "max_running_requests": settings.max_running_requests,
        "mamba_full_memory_ratio": settings.mamba_full_memory_ratio,
        "mamba_radix_cache_strategy": settings.mamba_strategy,
        "attention_backend": settings.attention_backend,
        "page_size": settings.page_size,
        "cuda_graph_config": {
            "decode": {
                "backend": "full" if settings.decode_graphs else "disabled",
                "max_bs": max(settings.decode_sizes),
                "bs": list(settings.decode_sizes),
            },
            "prefill": {
                "backend": "breakable" if settings.prefill_graphs else "disabled",
                "max_bs": max(settings.prefill_sizes),
                "bs": list(settings.prefill_sizes),
            },
        },
    }
    if speculation is not None:
        resolved |= {
            "speculative_algorithm": speculation.algorithm,
            "speculative_num_draft_tokens": speculation.draft_tokens,
            "speculative_num_steps": speculation.steps,
            "speculative_eagle_topk": 1,
        }
    return resolved


def _plain(value: object) -> object:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    return str(value)


if __name__ == "__main__":
    sys.exit(main())

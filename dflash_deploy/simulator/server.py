"""One running server: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from typing import TYPE_CHECKING

from dflash_deploy.simulator.api import Api
from dflash_deploy.simulator.engine import Engine
from dflash_deploy.simulator.http import Connection

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dflash_deploy.simulator.boot import Up
    from dflash_deploy.simulator.faults import Faults
    from dflash_deploy.simulator.logs import Log

_SIGTERM_POLL_S = 5.0


def serve(
    up: Up, *, seed: int, time_scale: float, faults: Faults, arguments: Mapping[str, object], log: Log
) -> int:
    """Run a server until a signal ends it; the process's exit status."""

    async def main() -> int:
        engine = Engine(up, seed=seed, time_scale=time_scale, faults=faults, log=log)
        return await _Server(engine, Api(engine, arguments)).run()

    return asyncio.run(main())


class _Server:
    def __init__(self, engine: Engine, api: Api) -> None:
        self._engine = engine
        self._api = api
        self._term_asked = False
        self._ended = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        engine = self._engine
        if not await self._listen():
            # SGLang's process stays, with the model loaded and nobody to reach it.
            await asyncio.Event().wait()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)
        loop.add_signal_handler(signal.SIGINT, lambda: engine.spawn(self._interrupt()))
        engine.spawn(engine.drive())
        engine.spawn(engine.warm_up())
        engine.spawn(self._watch_for_end())
        status: int = await self._ended
        return status

    async def _listen(self) -> bool:
        settings, log = self._engine.up.settings, self._engine.log
        host, port = settings.host, settings.port
        problem = (
            (errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)) if self._engine.faults.port_taken else None
        )
        if problem is None:
            try:
                await asyncio.get_running_loop().create_server(
                    lambda: Connection(self._api.answer), host, port, backlog=2048
                )
            except OSError as error:
                number = error.errno or 0
                problem = (number, os.strerror(number) if number > 0 else str(error))
            except OverflowError as error:
                problem = (errno.EINVAL, str(error))
        if problem is not None:
            log.raw(
                f"ERROR:    [Errno {problem[0]}] error while attempting to bind on address "
                f"({host!r}, {port}): {problem[1].lower()}\n"
            )
            return False
        log.access(f"Uvicorn running on http://{host}:{port} (Press CTRL+C to quit)")
        return True

    def _on_sigterm(self) -> None:
        if self._engine.faults.ignore_sigterm:
            return
        if not self._term_asked:
            self._engine.log.line(
                "SIGTERM received. signum=None, frame=None. Draining requests and shutting down..."
            )
        self._term_asked = True

    async def _watch_for_end(self) -> None:
        """Look every five seconds whether it was told to go; then drain, however long that takes."""
        engine = self._engine
        while True:
            await engine.sleep(_SIGTERM_POLL_S)
            if not self._term_asked:
                continue
            if not engine.healthy:
                engine.log.line("Signal SIGTERM received while health check failed. Force exiting.")
                os.kill(os.getpid(), signal.SIGKILL)
            if engine.state != "dead":
                engine.state = "draining"
            left = [reply.rid for reply in engine.replies.values()]
            engine.log.line(
                f"Gracefully exiting... Remaining number of requests {len(left)}. Remaining requests "
                f"remaining_rids={left}."
            )
            if not left or os.environ.get("SGL_FORCE_SHUTDOWN") == "1":
                self._end()
                return

    async def _interrupt(self) -> None:
        """Wait for open answers; an idle server dies of the signal itself."""
        engine = self._engine
        if engine.replies:
            while engine.replies:
                await engine.sleep(0.2)
            self._end()
            return
        await engine.sleep(0.4)
        engine.log.raw("Traceback (most recent call last):\nKeyboardInterrupt\n")
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(0)

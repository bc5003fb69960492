"""A server's output: kept as it came, and read while it comes."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

from dflash_deploy.engine.boot import BootRecord
from dflash_deploy.engine.sglang.bootlog import BootLog, Progress
from dflash_deploy.engine.sglang.logline import log_lines
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.machine.text import printable

HEAD_LIMIT_BYTES = 16 << 20
"""What is kept of the start of a log: every start, and hours of serving."""
TAIL_LIMIT_BYTES = 1 << 20
"""What is kept of the end of a longer log: the last words before a death."""

_LINE_LIMIT_BYTES = 64 << 10
_LAST_LINE_LIMIT = 300
_CHUNK_BYTES = 64 << 10
_LINE_END = re.compile(rb"[\r\n]")


class ServerLog:
    """Takes a server's output from a pipe until its end, in a thread of its own.

    Raw bytes go to the file, lines to the reader of the boot log. Lines end at carriage returns too, since
    progress bars are drawn so. The pipe is emptied whatever happens to the file: a server that cannot print
    stands still.
    """

    def __init__(
        self,
        path: Path,
        *,
        head_limit_bytes: int = HEAD_LIMIT_BYTES,
        tail_limit_bytes: int = TAIL_LIMIT_BYTES,
    ) -> None:
        """Open the file, empty.

        Raises:
            DeployError: it cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # The log may show the API key: the engine prints its arguments.
            self._file = open(path, "wb", buffering=0, opener=_private)  # noqa: SIM115
        except OSError as error:
            raise _not_writable(path, error) from error
        self._path = path
        self._head_left_bytes = head_limit_bytes
        self._tail_limit_bytes = tail_limit_bytes
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._left_out_bytes = 0
        self._line = bytearray()
        self._changed = threading.Condition()
        self._boot_log = BootLog()
        self._last_line = ""
        self._last_output = time.monotonic()
        self._thread: threading.Thread | None = None
        self._problem: DeployError | None = None

    def follow(self, pipe: IO[bytes], on_lost: Callable[[], None]) -> None:
        """Start to read.

        Args:
            pipe: what to read; closed at its end.
            on_lost: called once, in the reading thread, when the file can no longer be written.
        """
        self._thread = threading.Thread(
            target=self._read, args=(pipe, on_lost), name="server-log", daemon=True
        )
        self._thread.start()

    @property
    def boot(self) -> BootRecord:
        """What the log tells so far."""
        with self._changed:
            return self._boot_log.record()

    @property
    def progress(self) -> Progress:
        """Where the start stands."""
        with self._changed:
            return self._boot_log.progress

    @property
    def last_line(self) -> str:
        """The last line that is not blank, without its date and safe for a terminal."""
        return self._last_line

    @property
    def last_output(self) -> float:
        """When something was last printed, by the monotonic clock."""
        return self._last_output

    @property
    def problem(self) -> DeployError | None:
        """Why the file can no longer be written; None while it can."""
        return self._problem

    def wait(self, timeout_s: float) -> None:
        """Wait until something is printed or the time is over."""
        with self._changed:
            self._changed.wait(timeout_s)

    def finish(self, timeout_s: float) -> None:
        """Wait for the end of the output, which comes when the last process that can print has ended."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def close(self) -> None:
        """Complete the file and close it; what comes after is lost. Safe to call again."""
        with self._changed:
            if self._file.closed:
                return
            try:
                self._write_tail()
            except OSError as error:
                self._problem = self._problem or _not_writable(self._path, error)
            self._file.close()

    def _read(self, pipe: IO[bytes], on_lost: Callable[[], None]) -> None:
        with pipe:
            while chunk := os.read(pipe.fileno(), _CHUNK_BYTES):
                with self._changed:
                    lost = not self._keep(chunk)
                    self._feed(chunk)
                    self._last_output = time.monotonic()
                    self._changed.notify_all()
                if lost:
                    on_lost()
        with self._changed:
            self._end_line()
            self._changed.notify_all()

    def _keep(self, chunk: bytes) -> bool:
        """Write a chunk or remember it for the tail; False once, when the file can no longer be written."""
        if self._problem or self._file.closed:
            return True
        head, rest = chunk[: self._head_left_bytes], chunk[self._head_left_bytes :]
        self._head_left_bytes -= len(head)
        try:
            _write_all(self._file.fileno(), head)
        except OSError as error:
            self._problem = _not_writable(self._path, error)
            return False
        if rest:
            self._tail.append(rest)
            self._tail_bytes += len(rest)
            while self._tail_bytes - len(self._tail[0]) >= self._tail_limit_bytes:
                self._tail_bytes -= len(self._tail[0])
                self._left_out_bytes += len(self._tail.popleft())
        return True

    def _write_tail(self) -> None:
        if not self._tail or self._problem:
            return
        note = f"\n[dflash-deploy: {self._left_out_bytes} bytes of this log left out here]\n"
        _write_all(
            self._file.fileno(), (note.encode() if self._left_out_bytes else b"") + b"".join(self._tail)
        )
        self._tail.clear()

    def _feed(self, chunk: bytes) -> None:
        *ended, rest = _LINE_END.split(chunk)
        for part in ended:
            self._extend_line(part)
            self._end_line()
        self._extend_line(rest)

    def _extend_line(self, part: bytes) -> None:
        self._line += part[: _LINE_LIMIT_BYTES - len(self._line)]

    def _end_line(self) -> None:
        line = self._line.decode(errors="replace")
        self._line.clear()
        self._boot_log.feed(line)
        for logged in log_lines(line):
            # The line with the arguments may show the API key.
            if logged.text and "api_key" not in logged.text:
                self._last_line = printable(logged.text.strip(), longest=_LAST_LINE_LIMIT)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _write_all(descriptor: int, content: bytes) -> None:
    """Write every byte: what a nearly full disk takes of one call may be a part."""
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def _not_writable(path: Path, error: OSError) -> DeployError:
    return DeployError(
        f"the server's log {path} cannot be written: {error.strerror}",
        fix=f"make room and check permissions in {path.parent}",
        exit_code=ExitCode.UNAVAILABLE,
    )

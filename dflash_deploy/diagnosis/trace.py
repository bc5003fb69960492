"""A traceback while it is read: its frames, its exceptions, and whether it ended the server."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from dflash_deploy.engine.sglang.logline import LogLine

LONGEST_LINES = 500
_FRAMES_KEPT = 60
_AFTER_EXCEPTION = 30

_FRAME = re.compile(r'^\s{0,12}File "(?P<file>[^"]{1,400})", line (?P<line>\d{1,9}), in (?P<name>\S{1,200})')
_EXCEPTION = re.compile(r"^(?P<type>(?:[A-Za-z_]\w{0,80}\.){0,8}[A-Z]\w{0,80})(?:: (?P<message>.{0,2000}))?$")
_ERROR_NAME = re.compile(r"(?:Error|Exception|Exit|Failure|Timeout|Expired)$")
_CHAIN = re.compile(r"^(?:During handling of the above exception|The above exception was the direct cause)")
_FATAL = re.compile(
    r"hit an exception|EngineCore (?:failed|encountered)|engine core initialization", re.IGNORECASE
)


@dataclass(frozen=True)
class Raised:
    """An exception as its line says it, and the frame that it came from."""

    number: int
    text: str
    frame: str | None


@dataclass
class Traceback:
    """One traceback with all that is chained to it."""

    number: int
    fatal: bool
    benign: bool = False
    frames: list[str] = field(default_factory=list)
    raised: list[Raised] = field(default_factory=list)
    lines: int = 0
    chained: bool = False
    _since_raised: int = 0

    @property
    def innermost(self) -> Raised | None:
        """The exception that all others came of."""
        return self.raised[0] if self.raised else None

    def takes(self, number: int, line: LogLine) -> bool:
        """Read the next line; False where the traceback has ended before it."""
        self.lines += 1
        text = line.text
        if self.lines > LONGEST_LINES:
            return False
        if line.dated:
            # Another process may speak in between; one that ended is over with the next message.
            return not self.raised
        if "Traceback (most recent call last)" in text:
            ended = bool(self.raised) and not self.chained
            self.chained = False
            return not ended
        if _CHAIN.match(text):
            self.chained = True
            return True
        frame = _FRAME.match(text)
        if frame is not None:
            self.frames = [*self.frames, text.strip()][-_FRAMES_KEPT:]
            return True
        exception = None if text.startswith((" ", "\t")) else _EXCEPTION.match(text)
        if exception is not None and (not self.raised or exception["message"] is not None):
            self.raised.append(Raised(number, text, self.frames[-1] if self.frames else None))
            self._since_raised = 0
        elif self.raised:
            self._since_raised += 1
        return self._since_raised <= _AFTER_EXCEPTION


def begin(number: int, text: str) -> Traceback | None:
    """The traceback that a line begins."""
    if "Traceback (most recent call last)" not in text:
        return None
    return Traceback(number, fatal=_FATAL.search(text) is not None)


def alone(number: int, line: LogLine) -> Traceback | None:
    """An exception's line that stands without a traceback, as one."""
    match = None if line.dated else _EXCEPTION.match(line.text)
    if match is None or match["message"] is None or not _ERROR_NAME.search(match["type"]):
        return None
    return Traceback(number, fatal=False, raised=[Raised(number, line.text, None)])

"""Why a start ended, read from its log."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from dflash_deploy.engine.boot import BootFailure, Stage
from dflash_deploy.engine.sglang.logline import LogLine

MESSAGE_LIMIT = 600

# Texts of SGLang that end a start, and the stage they belong to; None: wherever the start stood.
_FATAL: tuple[tuple[re.Pattern[str], Stage | None], ...] = tuple(
    (re.compile(text), stage)
    for text, stage in (
        (r"Loaded weights leave no GPU memory for the KV cache", Stage.SIZING),
        (r"Not enough memory\. Please try to increase --mem-fraction-static", Stage.SIZING),
        (r"Not enough GPU memory for hybrid \(mamba", Stage.SIZING),
        (r"state cache is too small to serve any requests", Stage.SIZING),
        (r"enable-linear-replayssm-spec with \S{1,20} requires", Stage.SIZING),
        (r"Capture prefill CUDA graph failed", Stage.PREFILL_CAPTURE),
        (r"Fail when using backend: \S{1,40} for prefill runner", Stage.PREFILL_CAPTURE),
        (r"(?:Breakable|Piecewise) CUDA [Gg]raph failed", Stage.PREFILL_CAPTURE),
        (r"Capture cuda graph failed", Stage.DECODE_CAPTURE),
        (r"address already in use", Stage.WARM_UP),
        (r"No module named '?sglang", Stage.ARGUMENTS),
        (r"is not a local folder and is not a valid model identifier", Stage.LOAD),
        (r"DFlash2 selector requires|DFlash candidate top-k requires", None),
        (r"CUDA out of memory\. Tried to allocate", None),
        (r"(?:Prefill|Decode) out of memory\. Try to lower your batch size", None),
        (r"alloc_req_slots runs out of memory", None),
        (r"CUDA error: ", None),
    )
)
# What is said once the cause has been said already, or was never logged.
_SYMPTOM = re.compile(
    r"Received sigquit from a child process|SIGQUIT received\. signum|crashed with exit code|"
    r"scheduler died during initialization|watchdog timeout \(|Health check failed\. Server couldn't get|"
    r"^Killed$|oom-kill|Out of memory: Killed process"
)
_USAGE = re.compile(r"^[\w./ -]{1,80}: error: (?P<message>.+)")
_EXCEPTION = re.compile(r"^(?P<type>(?:[A-Za-z_]\w{0,80}\.){0,8}[A-Z]\w{0,80})(?:: (?P<message>.*))?$")
_ERROR_TYPE = re.compile(r"(?:Error|Exception|Exit|Failure|Interrupt|Timeout|Expired)$")
# Imports that SGLang can do without, and reports at length.
_HARMLESS = re.compile(r"libtorchcodec|torchcodec|libavutil|Ignore import error|KeyboardInterrupt")
_WRAPPERS = re.compile(r"Capture (?:prefill )?(?:cuda|CUDA) graph failed: ")


@dataclass
class _Traceback:
    """A traceback while it is read: its exceptions in order, the cause of each next one first."""

    fatal: bool
    exceptions: list[str] = field(default_factory=list)
    caused: bool = False
    awaits: bool = True

    def add(self, text: str) -> None:
        """Take the exception line that ends one part.

        The last exception of a chain is the one that ended things, unless it names, or merely repeats, the
        one before it.
        """
        before = self.exceptions[-1] if self.exceptions else None
        message = before.partition(": ")[2][:80] if before else ""
        if before and (self.caused or (message and message in text)):
            text = before
        self.exceptions.append(text)
        self.awaits = self.caused = False


class FailureReader:
    """Reads a log for the reason why the server ended."""

    def __init__(self) -> None:
        self._cause: BootFailure | None = None
        self._unproven: BootFailure | None = None
        self._symptom: BootFailure | None = None
        self._traceback: _Traceback | None = None

    def failure(self) -> BootFailure | None:
        """The innermost message that explains the end, as far as the log tells."""
        return self._cause or self._unproven or self._symptom

    def feed(self, line: LogLine, stage: Stage) -> None:
        """Take the next line; ``stage`` is where the start stands."""
        text = line.text
        if self._cause is not None and self._traceback is None:
            return
        if "Traceback (most recent call last)" in text:
            if self._traceback is None or line.dated:
                self._traceback = _Traceback(fatal="hit an exception" in text)
            self._traceback.awaits = True
            return
        if self._traceback is not None and self._in_traceback(self._traceback, line, stage):
            return
        if line.dated:
            self.went_on()
        self._single_line(line, stage)

    def went_on(self) -> None:
        """The server went on: whatever was thrown until now did not end it."""
        self._unproven = None

    def _in_traceback(self, traceback: _Traceback, line: LogLine, stage: Stage) -> bool:
        text = line.text
        if line.dated:
            if not traceback.awaits:
                self._traceback = None
            return False
        if text.startswith("The above exception was the direct cause"):
            traceback.caused = True
            return True
        exception = _EXCEPTION.match(text) if traceback.awaits else None
        if exception is None:
            return True
        traceback.add(text)
        if _HARMLESS.search(text):
            return True
        found = BootFailure(_stage_of(text, stage), _shorten(traceback.exceptions[-1]))
        if traceback.fatal or _fatal(text) is not None:
            self._cause = found
        elif stage is not Stage.SERVING:
            # Once it serves, a request that fails is not the end of the server.
            self._unproven = replace(found, certain=False)
        return True

    def _single_line(self, line: LogLine, stage: Stage) -> None:
        text = line.text
        usage = _USAGE.match(text)
        if usage is not None and not line.dated:
            self._cause = BootFailure(Stage.ARGUMENTS, _shorten(usage["message"]))
            return
        exception = None if line.dated else _EXCEPTION.match(text)
        named = exception is not None and _ERROR_TYPE.search(exception["type"]) is not None
        if _SYMPTOM.search(text):
            self._symptom = self._symptom or BootFailure(stage, _shorten(text))
        elif _fatal(text) is not None and not text.startswith("Disable "):
            self._cause = BootFailure(_stage_of(text, stage), _shorten(text))
        elif named and stage is not Stage.SERVING and not _HARMLESS.search(text):
            self._unproven = BootFailure(_stage_of(text, stage), _shorten(text), certain=False)


def _fatal(text: str) -> tuple[re.Pattern[str], Stage | None] | None:
    return next((entry for entry in _FATAL if entry[0].search(text)), None)


def _stage_of(text: str, stage: Stage) -> Stage:
    entry = _fatal(text)
    known = entry[1] if entry is not None else None
    if known is Stage.DECODE_CAPTURE and stage is Stage.DRAFT_CAPTURE:
        return stage
    if known is not None:
        return known
    if stage is Stage.SIZING and "out of memory" in text:
        # The sizing itself allocates nothing: the pools that follow it did not fit.
        return Stage.POOLS
    return stage


def _shorten(text: str) -> str:
    text = _WRAPPERS.sub("", text.strip())
    return text if len(text) <= MESSAGE_LIMIT else text[: MESSAGE_LIMIT - 1] + "…"

"""What is read of one streamed answer, piece by piece as it comes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_deploy.bench.claims import count, figure, text_of
from dflash_deploy.bench.sse import EventReader, TooLongError
from dflash_deploy.bench.transport import Failure, excerpt

MAX_ANSWER_BYTES = 16 << 20
_BYTES_A_CHUNK = 64
"""That a chunk takes beside its text."""

_MOST_TOOL_CALLS = 64
_DONE = b"[DONE]"
_DATA = b"data: "
_TEXTS = ("content", "reasoning_content", "reasoning")
_PROBE = b"\x7fprobe\x7f"
_MOST_FORMS = 8
"""Forms of events that are learnt without one that follows: each costs as much as two events."""

_parse = json.JSONDecoder().decode
_PLAIN = re.compile(rb'[^"\\\x00-\x1f]*').fullmatch
"""What stands in JSON as it is."""


@dataclass(frozen=True)
class Times:
    """When things happened, in seconds of one clock."""

    sent_s: float
    first_s: float
    last_s: float
    ended_s: float


@dataclass
class _Form:
    """The bytes around the text of an event like which many follow."""

    before: bytes
    after: bytes

    @classmethod
    def of(cls, piece: bytes, event: dict[str, object], text: str) -> _Form | None:
        """From a piece that is one event of text alone; None where it is not sure to be one of a kind.

        Sure is what is parsed: with another text in the same place, all but the text must come out the same.
        """
        encoded = text.encode(errors="surrogatepass")
        at = piece.find(b'"%s"' % encoded)
        if at < 0 or not _PLAIN(encoded) or _PROBE in piece or _says_more(event):
            return None
        form = cls(piece[: at + 1], piece[at + 1 + len(encoded) :])
        try:
            other = _parse((form.before + _PROBE + form.after)[len(_DATA) :].decode())
        except ValueError:
            return None
        for key in _TEXTS:
            ours, theirs = _delta(event), _delta(other)
            if ours.get(key) == text and theirs.get(key) == _PROBE.decode():
                theirs[key] = text
                return form if other == event else None
        return None


@dataclass
class Answer:
    """What has come so far.

    Attributes:
        prompt_id: of what was asked; ``long`` where it wants about a thousand tokens.
        ends_freely: no length was asked for.
        thought_tokens: of ``output_tokens``, by the server's count; ``thinks_aloud`` where they were shown.
    """

    prompt_id: str = ""
    long: bool = True
    ends_freely: bool = False
    pieces: list[str] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    held_bytes: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    thought_tokens: int = 0
    thinks_aloud: bool = False
    spec: Mapping[str, object] = field(default_factory=dict)
    calls: dict[int, list[str]] = field(default_factory=dict)
    finish_reason: str | None = None
    times: Times | None = None
    done: bool = False
    _reader: EventReader = field(default_factory=EventReader)
    _form: _Form | None = None
    _forms_left: int = _MOST_FORMS

    def take(self, piece: bytes, now: float) -> bool:
        """Take bytes as they come; True once the answer is over.

        Raises:
            Failure: they are no answer.
        """
        form = self._form
        if form is not None and piece.startswith(form.before) and piece.endswith(form.after):
            text = piece[len(form.before) : -len(form.after)]
            if text and _PLAIN(text):
                # As the parser would have it, at a tenth of the time.
                try:
                    self._keep(text.decode(), now)
                except UnicodeDecodeError:
                    # For the parser to refuse.
                    self._form = None
                else:
                    self._forms_left = _MOST_FORMS
                    return False
        try:
            for data in self._reader.feed(piece):
                # What follows the end is no part of the answer, in whatever packets it comes.
                if not self.done:
                    self._event(data, piece, now)
        except TooLongError as error:
            raise Failure("broken", f"broken stream: {error}") from None
        except RecursionError:
            raise Failure("broken", "broken JSON in the stream: nested too deeply") from None
        if not self._reader.between_events:
            self._form = None
        return self.done

    def _event(self, data: bytes, piece: bytes, now: float) -> None:
        if data.strip() == _DONE:
            self.done = True
            return
        try:
            event = _parse(data.decode())
        except ValueError:
            raise Failure("broken", f"broken JSON in the stream: {excerpt(data)}") from None
        if not isinstance(event, dict):
            raise Failure("broken", f"an event that is no object: {excerpt(data)}")
        # Most tell it by the first, older vLLM by the second.
        wrong = event.get("error") or (event if event.get("object") == "error" else None)
        if wrong:
            raise Failure("server", f"error in the stream: {excerpt(json.dumps(wrong).encode())}")
        choices = event.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            text = self._choice(choices[0])
            if text:
                self._keep(text, now)
                if self._forms_left and piece == b"%s%s\n\n" % (_DATA, data):
                    self._forms_left -= 1
                    self._form = _Form.of(piece, event, text)
        if event.get("usage") is not None or event.get("sglext") is not None:
            self._facts(event)

    def _keep(self, text: str, now: float) -> None:
        self.pieces.append(text)
        self.at_s.append(now)
        self.held_bytes += len(text) + _BYTES_A_CHUNK
        if self.held_bytes > MAX_ANSWER_BYTES:
            raise Failure("broken", "the answer does not end")

    def _choice(self, choice: dict[str, object]) -> str:
        """Whatever the model wrote, to be seen or not: all of it took time."""
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            self.finish_reason = reason[:40]
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            return ""
        calls = delta.get("tool_calls")
        written = self._calls(calls) if isinstance(calls, list) else ""
        content, *thoughts = (text_of(delta.get(key)) for key in _TEXTS)
        thought = next(filter(None, thoughts), None)
        self.thinks_aloud = self.thinks_aloud or thought is not None
        return "".join(filter(None, (thought, content, written)))

    def _calls(self, calls: list[object]) -> str:
        written = ""
        for call in calls[:_MOST_TOOL_CALLS]:
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(call, dict) or not isinstance(function, dict):
                continue
            index = call.get("index")
            place = index if isinstance(index, int) and 0 <= index < _MOST_TOOL_CALLS else 0
            name, arguments = (
                part if isinstance(part, str) else ""
                for part in (function.get("name"), function.get("arguments"))
            )
            known = self.calls.setdefault(place, ["", ""])
            known[0] += name[:200]
            known[1] += arguments
            written += name + arguments
        return written

    def _facts(self, event: dict[str, object]) -> None:
        usage = event.get("usage")
        if isinstance(usage, dict):
            self.prompt_tokens = _last(count(usage.get("prompt_tokens")), self.prompt_tokens)
            self.output_tokens = _last(count(usage.get("completion_tokens")), self.output_tokens)
            details = usage.get("prompt_tokens_details")
            if isinstance(details, dict):
                self.cached_tokens = _last(count(details.get("cached_tokens")), self.cached_tokens)
            details = usage.get("completion_tokens_details")
            # As OpenAI has it, and as SGLang does.
            told = (details if isinstance(details, dict) else usage).get("reasoning_tokens")
            self.thought_tokens = count(told) or self.thought_tokens
            self.times = _simulated_times(event.get("simulated")) or self.times
        extension = event.get("sglext")
        spec = extension.get("spec_tokens_details") if isinstance(extension, dict) else None
        if isinstance(spec, dict):
            self.spec = spec


def _simulated_times(value: object) -> Times | None:
    if not isinstance(value, dict):
        return None
    told = [value.get(key) for key in ("arrived_s", "first_token_s", "finished_s")]
    times = [time for one in told if (time := figure(one)) is not None]
    if len(times) != len(told) or times != sorted(times) or times[0] == times[-1]:
        return None
    arrived_s, first_s, finished_s = times
    return Times(arrived_s, first_s, finished_s, finished_s)


def _last(told: int | None, before: int | None) -> int | None:
    return before if told is None else told


def _delta(event: dict[str, Any]) -> dict[str, object]:
    """Of an event that is known to have one."""
    delta: dict[str, object] = event["choices"][0]["delta"]
    return delta


def _says_more(event: dict[str, Any]) -> bool:
    """It tells something beside a text, which is not to be passed over."""
    told = (event.get("usage"), event.get("sglext"), event["choices"][0].get("finish_reason"))
    return any(one is not None for one in told) or bool(_delta(event).get("tool_calls"))

"""One generation's answer in each of SGLang's three dialects: chat, completion, and ``/generate``."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dflash_deploy.simulator.http import Connection
    from dflash_deploy.simulator.scheduler import Job, Output
    from dflash_deploy.simulator.settings import Settings
    from dflash_deploy.simulator.text import Answer

Dialect = Literal["chat", "text", "generate"]

_END = b',"logprobs":null,"finish_reason":null,"matched_stop":null}],"usage":null}'


@dataclass
class Reply:
    """The answer to one request, streamed or whole.

    Attributes:
        dialect: ``chat``, ``text`` (completions) or ``generate``.
        with_usage: the stream ends with a usage chunk.
        usage_error: what ``usage`` counts too many, a fault.
        stall_after: tokens after which nothing more is sent, a fault.
        complete: the answer is out.
    """

    job: Job
    connection: Connection
    answer: Answer
    settings: Settings
    dialect: Dialect
    stream: bool
    with_usage: bool
    usage_error: int = 0
    stall_after: int | None = None
    complete: bool = False
    started: bool = False
    sent: int = 0
    text: str = ""
    rid: str = ""
    _held: int = 0
    _head: bytes = b""
    _tail: bytes = b""
    _created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        kind = {"chat": "chat.completion.chunk", "text": "text_completion"}.get(self.dialect, "")
        if not kind:
            return
        name = json.dumps(self.settings.served_model_name)
        start = (
            f'{{"id":"{self.rid}","object":"{kind}","created":{self._created},"model":{name},'
            '"choices":[{"index":0,'
        )
        if self.dialect == "chat":
            self._head = (start + '"delta":{"role":null,"content":').encode()
            self._tail = b',"reasoning_content":null,"tool_calls":null}' + _END
        else:
            self._head = (start + '"text":').encode()
            self._tail = _END

    def take(self, output: Output) -> bool:
        """What a step yielded. True when something must be flushed."""
        if self.stall_after is not None and (not self.stream or self.sent >= self.stall_after):
            return False
        self._held += output.tokens
        self.complete = output.finished
        if not self.stream:
            if output.finished:
                self._whole()
            return False
        if self._held < self.settings.stream_interval and not output.finished:
            return False
        self._chunk(output.finished)
        if output.finished:
            self.connection.end_stream()
            return False
        return True

    def abort(self) -> None:
        """End early, because somebody asked for it."""
        self.complete = True
        if not self.stream or not self.started:
            self.connection.respond(400, {"error": {"message": "Abort in waiting queue"}})
            return
        self.connection.event(b"[DONE]")
        self.connection.end_stream()

    def _chunk(self, finished: bool) -> None:
        connection = self.connection
        words = self.answer.take(self._held)
        self.sent += self._held
        self._held = 0
        if not self.started:
            self.started = True
            connection.begin_stream()
            if self.dialect == "chat":
                connection.event(
                    self._head.replace(b'"role":null', b'"role":"assistant"') + b'""' + self._tail
                )
        if self.dialect == "generate":
            self.text += words
            connection.event(_dumps({"text": self.text, "output_ids": [], "meta_info": self._meta(finished)}))
        else:
            connection.event(self._head + json.dumps(words).encode() + self._tail)
            if finished:
                reason = b'"finish_reason":"%b"' % self._reason().encode()
                empty = b"null" if self.dialect == "chat" else b'""'
                connection.event(self._head + empty + self._tail.replace(b'"finish_reason":null', reason))
                if self.with_usage:
                    connection.event(self._usage_chunk())
        if finished:
            connection.event(b"[DONE]")

    def _usage_chunk(self) -> bytes:
        """The last chunk; beside what SGLang sends, it tells when things happened by the simulator's clock.

        A client that measures by its own clock reads its own delays too, multiplied by the time scale.
        """
        job = self.job
        kind = "chat.completion.chunk" if self.dialect == "chat" else "text_completion"
        return _dumps(
            {
                "id": self.rid,
                "object": kind,
                "created": self._created,
                "model": self.settings.served_model_name,
                "choices": [],
                "usage": self._usage(),
                "simulated": {
                    "arrived_s": job.arrived_s,
                    "first_token_s": job.first_token_s,
                    "finished_s": job.finished_s,
                },
            }
        )

    def _whole(self) -> None:
        words = self.answer.take(self._held)
        self.sent = self._held
        if self.dialect == "generate":
            self.connection.respond(200, {"text": words, "output_ids": [], "meta_info": self._meta(True)})
            return
        choice: dict[str, object] = {
            "index": 0,
            "logprobs": None,
            "finish_reason": self._reason(),
            "matched_stop": None,
        }
        if self.dialect == "chat":
            choice["message"] = {
                "role": "assistant",
                "content": words,
                "reasoning_content": None,
                "tool_calls": None,
            }
        else:
            choice["text"] = words
        self.connection.respond(
            200,
            {
                "id": self.rid,
                "object": "chat.completion" if self.dialect == "chat" else "text_completion",
                "created": self._created,
                "model": self.settings.served_model_name,
                "choices": [choice],
                "usage": self._usage(),
                "metadata": {"weight_version": "default"},
            },
        )

    def _reason(self) -> str:
        return "stop" if self.job.stops_by_itself else "length"

    def _usage(self) -> dict[str, object]:
        completion = self.job.produced + self.usage_error
        return {
            "prompt_tokens": self.job.prompt_tokens,
            "total_tokens": self.job.prompt_tokens + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": self.job.cached}
            if self.settings.cache_report
            else None,
            "completion_tokens_details": None,
            "reasoning_tokens": 0,
        }

    def _meta(self, finished: bool) -> dict[str, object]:
        job = self.job
        end = job.finished_s if job.finished_s is not None else job.first_token_s or job.arrived_s
        first = job.first_token_s if job.first_token_s is not None else end
        reason = {"type": self._reason()} | ({} if job.stops_by_itself else {"length": job.new_tokens})
        meta: dict[str, object] = {
            "id": self.rid,
            "finish_reason": reason if finished else None,
            "prompt_tokens": job.prompt_tokens,
            "completion_tokens": job.produced + self.usage_error,
            "cached_tokens": job.cached,
            "cached_tokens_details": None,
            "weight_version": "default",
            "num_retractions": job.retractions,
            "queue_time": (job.started_s or job.arrived_s) - job.arrived_s,
            "e2e_latency": end - job.arrived_s,
            "decode_throughput": (job.produced - 1) / (end - first) if end > first else None,
        }
        if self.settings.release >= (0, 5, 21):
            meta["first_token_latency"] = first - job.arrived_s
        speculation = self.settings.speculation
        if speculation is not None and job.verify_steps:
            correct = sum(index * count for index, count in enumerate(job.histogram))
            proposed = job.verify_steps * (speculation.draft_tokens - 1)
            meta |= {
                "spec_verify_ct": job.verify_steps,
                "spec_accept_length": job.produced / job.verify_steps,
                "spec_accept_rate": correct / proposed if proposed else 0.0,
                "spec_num_correct_drafts": correct,
                "spec_num_proposed_drafts": proposed,
                "spec_correct_drafts_histogram": job.histogram,
            }
            if self.settings.release <= (0, 5, 20):
                meta |= {
                    "spec_accepted_drafts": correct,
                    "spec_proposed_drafts": proposed,
                    "spec_accept_histogram": job.histogram,
                }
        return meta


def _dumps(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()

"""SGLang's endpoints."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from dflash_deploy.simulator.http import Connection, Request
from dflash_deploy.simulator.metrics import render
from dflash_deploy.simulator.prefix_cache import prefixes
from dflash_deploy.simulator.replies import Dialect, Reply
from dflash_deploy.simulator.scheduler import Job
from dflash_deploy.simulator.text import Answer, count_tokens, fingerprint, task_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dflash_deploy.simulator.engine import Engine

_HEALTH_TIMEOUT_S = 20
_NATURAL_TOKENS = (1100, 1500)
_CHAT_TOKENS = 9
_MESSAGE_TOKENS = 4
_OPEN_PATHS = frozenset({"/health", "/health_generate", "/ready", "/metrics"})

Handler = Callable[[Request, Connection], None]


class BadRequestError(Exception):
    """What the client sent cannot be served; the message says why."""


@dataclass(frozen=True)
class _Ask:
    """What one of the three dialects asks for."""

    dialect: Dialect
    prompt: str
    tokens: int
    limit: object
    default_limit: int | None
    options: Mapping[str, object]


class Api:
    """Answers every request: at once, or through the engine."""

    def __init__(self, engine: Engine, arguments: Mapping[str, object]) -> None:
        self._engine = engine
        self._settings = engine.up.settings
        self._arguments = arguments
        self._routes: dict[str, tuple[str, Handler]] = {
            "/health": ("GET", self._health),
            "/health_generate": ("GET", self._health),
            "/v1/models": ("GET", self._models),
            "/server_info": ("GET", self._server_info),
            "/get_server_info": ("GET", self._server_info),
            "/model_info": ("GET", self._model_info),
            "/get_model_info": ("GET", self._model_info),
            "/flush_cache": ("GET POST", self._flush),
            "/v1/loads": ("GET", self._loads),
            "/abort_request": ("POST", self._abort),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completions),
            "/generate": ("POST", self._generate),
        }
        if self._settings.enable_metrics:
            self._routes["/metrics"] = ("GET", self._metrics)
        if self._settings.release >= (0, 5, 20):
            self._routes["/ready"] = ("GET", self._ready)

    def answer(self, request: Request, connection: Connection) -> None:
        """Answer one request, now or when its tokens are there."""
        key = self._settings.api_key
        authorized = key is None or request.headers.get("authorization") == f"Bearer {key}"
        methods, handler = self._routes.get(request.path, ("", None))
        if not authorized and request.path not in _OPEN_PATHS:
            self._reply(request, connection, 401, {"error": "Unauthorized"})
        elif handler is None:
            self._reply(request, connection, 404, {"detail": "Not Found"})
        elif request.method not in methods.split():
            self._reply(request, connection, 405, {"detail": "Method Not Allowed"})
        else:
            try:
                handler(request, connection)
            except BadRequestError as problem:
                self._reply(request, connection, 400, _error(str(problem), "BadRequestError", 400))

    def _reply(
        self,
        request: Request,
        connection: Connection,
        status: int,
        body: object,
        *,
        content_type: str = "application/json",
    ) -> None:
        self._log_access(request, connection, status)
        connection.respond(status, body, content_type=content_type)

    def _log_access(self, request: Request, connection: Connection, status: int) -> None:
        path = request.path.encode("ascii", "backslashreplace").decode()[:200]
        phrase = HTTPStatus(status).phrase
        self._engine.log.access(
            f'{connection.peer} - "{request.method} {path!s} HTTP/1.1" {status} {phrase}'.replace("\n", " ")
        )

    # Health and facts

    def _health(self, request: Request, connection: Connection) -> None:
        if self._engine.state in ("starting", "draining"):
            self._reply(request, connection, 503, "", content_type="text/plain")
        else:
            self._engine.spawn(self._probe(request, connection))

    async def _probe(self, request: Request, connection: Connection) -> None:
        """Generate one token unless something runs, and look once a second whether anything came."""
        engine = self._engine
        asked = engine.now_s()
        started = time.strftime("%H:%M:%S")
        if engine.idle:
            engine.submit(Job(prompt_tokens=1, new_tokens=1, probe=True))
        for _ in range(_HEALTH_TIMEOUT_S):
            await engine.sleep(1.0)
            if not connection.open:
                return
            if engine.last_output_s >= asked:
                engine.healthy = True
                self._reply(request, connection, 200, "", content_type="text/plain")
                return
        engine.healthy = False
        engine.log.line(
            "Health check failed. Server couldn't get a response from detokenizer for last "
            f"{_HEALTH_TIMEOUT_S} seconds. tic start time: {started}. last_heartbeat time: {started}"
        )
        self._reply(request, connection, 503, "", content_type="text/plain")

    def _ready(self, request: Request, connection: Connection) -> None:
        good = self._engine.state == "ready" and self._engine.healthy
        self._reply(request, connection, 200 if good else 503, "", content_type="text/plain")

    def _models(self, request: Request, connection: Connection) -> None:
        name = self._settings.served_model_name
        card = {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "sglang",
            "root": name,
            "parent": None,
            "max_model_len": self._settings.context_length,
        }
        self._reply(request, connection, 200, {"object": "list", "data": [card]})

    def _model_info(self, request: Request, connection: Connection) -> None:
        settings = self._settings
        info = {
            "model_path": settings.model_path,
            "served_model_name": settings.served_model_name,
            "tokenizer_path": settings.model_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "has_image_understanding": settings.vision_loaded,
            "has_audio_understanding": False,
            "model_type": "qwen3_5",
            "architectures": [settings.target.architecture],
        }
        self._reply(request, connection, 200, info)

    def _server_info(self, request: Request, connection: Connection) -> None:
        engine, settings = self._engine, self._settings
        up, total = engine.up, settings.card.memory_mib
        info = {
            **self._arguments,
            "status": "ready",
            "version": settings.version,
            "max_total_num_tokens": up.pools.tokens,
            "max_req_input_len": self._max_input(),
            "internal_states": [self._internal_state()],
            "simulator": {
                "card": settings.card.id,
                "seed": engine.seed,
                "time_scale": engine.time_scale,
                "vram_used_mib": round(total - engine.scheduler.free_gib * 1024),
                "vram_total_mib": total,
            },
        }
        self._reply(request, connection, 200, info)

    def _internal_state(self) -> dict[str, object]:
        settings, up, scheduler = self._settings, self._engine.up, self._engine.scheduler
        graph: object
        verify = round(up.verify_graph.gib, 3)
        if settings.release <= (0, 5, 16):
            graph = round(up.verify_graph.gib + up.draft_graph.gib + up.prefill_graph_gib, 2)
        else:
            graph = {
                "prefill": round(up.prefill_graph_gib, 3),
                "decode": 0.0 if settings.speculation else verify,
                "target_verify": verify if settings.speculation else 0.0,
                "draft_prefill": 0.0,
                "draft_decode": round(up.draft_graph.gib, 3),
                "draft_extend": 0.0,
            }
        usage: dict[str, object] = {
            "weight": round(up.weights_gib, 3),
            "kvcache": round(up.pools.kv, 3),
            "token_capacity": up.pools.tokens,
            "graph": graph,
        }
        if settings.release >= (0, 5, 17):
            usage |= {"startup_available": round(up.free_gib, 3), "token_capacity_swa": None}
        state: dict[str, object] = {
            **self._arguments,
            "last_gen_throughput": scheduler.last_throughput,
            "effective_max_running_requests_per_dp": up.pools.running,
            "memory_usage": usage,
            "startup_time": up.timings_s["scheduler_e2e"],
        }
        if settings.release >= (0, 5, 21):
            state["decode_cuda_graph_bs"] = list(up.verify_graph.sizes)
            state["decode_cuda_graph_memory_gb"] = verify
            state["disaggregation_mode"] = "null"
        verified = scheduler.counters.verify_steps
        if verified:
            state["avg_spec_accept_length"] = scheduler.counters.accepted / verified
        return state

    def _metrics(self, request: Request, connection: Connection) -> None:
        text = render(self._engine.scheduler, self._engine.timings)
        kind = "text/plain; version=0.0.4; charset=utf-8"
        self._reply(request, connection, 200, text, content_type=kind)

    def _loads(self, request: Request, connection: Connection) -> None:
        scheduler, tokens = self._engine.scheduler, self._engine.up.pools.tokens
        load = {
            "dp_rank": 0,
            "num_running_reqs": len(scheduler.running),
            "num_waiting_reqs": len(scheduler.waiting),
            "num_used_tokens": scheduler.used_tokens,
            "max_total_num_tokens": tokens,
            "token_usage": scheduler.used_tokens / tokens,
        }
        self._reply(request, connection, 200, {"loads": [load]})

    def _flush(self, request: Request, connection: Connection) -> None:
        if not self._engine.idle:
            self._reply(request, connection, 400, "Flush cache failed.\n", content_type="text/plain")
            return
        self._engine.scheduler.cache.clear()
        self._engine.log.line("Cache flushed successfully!")
        text = (
            "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting "
            "requests, the operation will not be performed.)\n"
        )
        self._reply(request, connection, 200, text, content_type="text/plain")

    def _abort(self, request: Request, connection: Connection) -> None:
        body = _json_object(request)
        for reply in list(self._engine.replies.values()):
            if body.get("abort_all") or body.get("rid") == reply.rid:
                self._engine.drop(reply.job)
                reply.abort()
        self._reply(request, connection, 200, "", content_type="text/plain")

    # Generation

    def _chat(self, request: Request, connection: Connection) -> None:
        body = _json_object(request)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadRequestError("messages: Field required: a list with at least one message")
        parts: list[str] = []
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise BadRequestError("messages: every message is an object with a role")
            parts.append(f"{message['role']}\n{_content(message.get('content'))}\n")
        limit = body.get("max_completion_tokens")
        ask = _Ask(
            dialect="chat",
            prompt="".join(parts),
            tokens=sum(count_tokens(part) + _MESSAGE_TOKENS for part in parts) + _CHAT_TOKENS,
            limit=body.get("max_tokens") if limit is None else limit,
            default_limit=None,
            options=body,
        )
        self._begin(request, connection, ask)

    def _completions(self, request: Request, connection: Connection) -> None:
        body = _json_object(request)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        text, tokens = _prompt(prompt, prompt, "prompt: a text or a list of token ids")
        self._begin(request, connection, _Ask("text", text, tokens, body.get("max_tokens"), 16, body))

    def _generate(self, request: Request, connection: Connection) -> None:
        body = _json_object(request)
        text, tokens = _prompt(
            body.get("text"), body.get("input_ids"), "Either text or input_ids should be provided."
        )
        params = body.get("sampling_params") or {}
        if not isinstance(params, dict):
            raise BadRequestError("sampling_params: an object")
        options = {**params, "stream": body.get("stream"), "rid": body.get("rid")}
        self._begin(
            request,
            connection,
            _Ask("generate", text, tokens, params.get("max_new_tokens"), 128, options),
        )

    def _max_input(self) -> int:
        return min(self._settings.context_length - 1, self._engine.up.pools.tokens - 1) - 5

    def _new_tokens(self, ask: _Ask) -> int:
        """Tokens the client may have, by its own limit and the model's."""
        context = self._settings.context_length
        limit = ask.limit
        if limit is None:
            limit = ask.default_limit or max(1, context - ask.tokens - 1)
        elif not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise BadRequestError(f"max_tokens must be a positive whole number, got {limit!r}")
        elif ask.tokens + limit > context:
            raise BadRequestError(
                f"Requested token count exceeds the model's maximum context length of {context} tokens. You "
                f"requested a total of {ask.tokens + limit} tokens: {ask.tokens} tokens from the input "
                f"messages and {limit} tokens for the completion. Please reduce the number of tokens in the "
                "input messages or the completion to fit within the limit."
            )
        if ask.tokens > self._max_input():
            raise BadRequestError(
                f"Input length ({ask.tokens} tokens) exceeds the maximum allowed length "
                f"({self._max_input()} tokens). Use a shorter input or enable --allow-auto-truncate."
            )
        room = min(context, self._engine.up.pools.tokens) - ask.tokens - 1
        return max(1, min(limit, room))

    def _begin(self, request: Request, connection: Connection, ask: _Ask) -> None:
        settings, engine = self._settings, self._engine
        wanted = self._new_tokens(ask)
        queued = settings.max_queued_requests
        if queued is not None and engine.queued >= queued:
            error = _error("The request queue is full.", "ServiceUnavailableError", 503)
            self._reply(request, connection, 503, error)
            return
        mark = fingerprint(ask.prompt)
        natural = _NATURAL_TOKENS[0] + mark % _NATURAL_TOKENS[1]
        stops = not ask.options.get("ignore_eos") and natural < wanted
        every = settings.mamba_track_interval if settings.target.linear is not None else 64
        job = Job(
            prompt_tokens=ask.tokens,
            new_tokens=natural if stops else wanted,
            task=task_of(ask.prompt),
            fingerprint=mark,
            boundaries=prefixes(ask.prompt, ask.tokens, every) if settings.radix_cache else (),
            stops_by_itself=stops,
        )
        faults = engine.faults
        rid = ask.options.get("rid")
        options = ask.options.get("stream_options")
        asked_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        reply = Reply(
            job=job,
            connection=connection,
            answer=Answer(ask.prompt, engine.seed, faults.text(engine.scheduler.counters.finished)),
            settings=settings,
            dialect=ask.dialect,
            stream=bool(ask.options.get("stream")),
            with_usage=settings.usage_by_default or asked_usage,
            usage_error=max(7, job.new_tokens // 2) if faults.wrong_usage else 0,
            stall_after=faults.stall,
            rid=rid if isinstance(rid, str) and rid.isalnum() and rid.isascii() else uuid.uuid4().hex,
        )
        connection.on_close = lambda: engine.drop(job)
        self._log_access(request, connection, 200)
        engine.submit(job, reply, request.group)


def _error(message: str, kind: str, code: int) -> dict[str, object]:
    return {"object": "error", "message": message, "type": kind, "param": None, "code": code}


def _json_object(request: Request) -> dict[str, object]:
    try:
        body = json.loads(request.body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"Invalid request body: {error}") from None
    if not isinstance(body, dict):
        raise BadRequestError("Invalid request body: a JSON object is expected")
    return body


def _prompt(text: object, ids: object, fault: str) -> tuple[str, int]:
    """A prompt and its tokens, given as text or as token ids."""
    if isinstance(text, str):
        return text, max(1, count_tokens(text))
    if isinstance(ids, list) and ids and all(isinstance(one, int) for one in ids):
        return " ".join(map(str, ids)), len(ids)
    raise BadRequestError(fault)


def _content(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))
    raise BadRequestError("messages: content is a text or a list of parts")

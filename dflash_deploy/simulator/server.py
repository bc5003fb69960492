"""The running server: SGLang's endpoints over the scheduler, on a clock that runs as fast as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING

from dflash_deploy.simulator import logs
from dflash_deploy.simulator.boot import SchedulerDiedError, Up
from dflash_deploy.simulator.http import Connection, Request
from dflash_deploy.simulator.metrics import Timings, render
from dflash_deploy.simulator.prefix_cache import prefixes
from dflash_deploy.simulator.replies import Reply
from dflash_deploy.simulator.scheduler import Job, Output, Scheduler
from dflash_deploy.simulator.text import Answer, count_tokens, fingerprint, task_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dflash_deploy.simulator.faults import Faults

_HEALTH_TIMEOUT_S = 20
_SIGTERM_POLL_S = 5.0
_DEATH_S = 5.0
_NATURAL_TOKENS = (1100, 1500)
_CHAT_TOKENS = 9
_OPEN_PATHS = frozenset({"/health", "/health_generate", "/ready", "/metrics"})


class BadRequestError(Exception):
    """What the client sent cannot be served; the message says why."""


class Server:
    """One server that came up. ``run`` ends with the status that the process should exit with."""

    def __init__(
        self,
        up: Up,
        *,
        seed: int,
        time_scale: float,
        faults: Faults,
        arguments: Mapping[str, object],
        log: logs.Log,
    ) -> None:
        self._up = up
        self._settings = up.settings
        self._seed = seed
        self._scale = time_scale
        self._faults = faults
        self._arguments = arguments
        self._log = log
        self._scheduler = Scheduler(up, seed=seed, log=log.line)
        self._timings = Timings()
        self._replies: dict[int, Reply] = {}
        self._state = "starting"
        self._healthy = True
        self._last_output_s = -1.0
        self._zero = time.monotonic()
        self._wake = asyncio.Event()
        self._ended: asyncio.Future[int] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._term_asked = False
        self._connections: set[Connection] = set()

    async def run(self) -> int:
        """Serve until a signal ends it."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)
        loop.add_signal_handler(signal.SIGINT, self._on_sigint)
        if not await self._listen(loop):
            await asyncio.Event().wait()
        self._spawn(self._drive())
        self._spawn(self._warm_up())
        self._spawn(self._watch_for_end())
        return await self._ended

    async def _listen(self, loop: asyncio.AbstractEventLoop) -> bool:
        host, port = self._settings.host, self._settings.port
        taken = self._faults.port_taken
        if not taken:
            try:
                server = await loop.create_server(self._connect, host, port, backlog=2048)
            except OSError as error:
                self._log.raw(
                    f"ERROR:    [Errno {error.errno}] error while attempting to bind on address ({host!r}, {port}): "
                    f"{(os.strerror(error.errno) if error.errno else str(error)).lower()}\n"
                )
                return False
            self._log.access(f"Uvicorn running on http://{host}:{port} (Press CTRL+C to quit)")
            return server.is_serving()
        self._log.raw(
            f"ERROR:    [Errno 98] error while attempting to bind on address ({host!r}, {port}): "
            "address already in use\n"
        )
        return False

    def _connect(self) -> Connection:
        return Connection(self._answer)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _now_s(self) -> float:
        return (time.monotonic() - self._zero) * self._scale

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds) / self._scale)

    # --- the engine -------------------------------------------------------------------------------------------

    async def _drive(self) -> None:
        """Run steps when they are due: by the schedule, not by how long the last one took to send."""
        scheduler = self._scheduler
        while True:
            ends = scheduler.next_s
            if ends is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            # Always give way once, so that connections are read even when steps fall behind.
            await asyncio.sleep(max(0.0, (ends - self._now_s()) / self._scale))
            try:
                self._hand_out(scheduler.advance(self._now_s()))
                self._check_faults()
            except SchedulerDiedError as failure:
                await self._die(failure)
                return

    def _hand_out(self, outputs: list[Output]) -> None:
        touched: dict[int, Connection] = {}
        for output in outputs:
            self._last_output_s = output.at_s
            job = output.job
            reply = self._replies.get(job.id)
            if output.finished:
                self._measure(job)
            if reply is not None and reply.take(output, lambda job=job: self._finish(job)):  # type: ignore[misc]
                touched[job.id] = reply.connection
        for connection in touched.values():
            connection.flush()

    def _measure(self, job: Job) -> None:
        if job.probe or job.finished_s is None or job.first_token_s is None:
            return
        self._timings.first_token.add(job.first_token_s - job.arrived_s)
        self._timings.end_to_end.add(job.finished_s - job.arrived_s)
        self._timings.queue.add((job.started_s or job.arrived_s) - job.arrived_s)

    def _finish(self, job: Job) -> None:
        reply = self._replies.pop(job.id, None)
        if reply is not None:
            reply.connection.on_close = None

    def _check_faults(self) -> None:
        faults, scheduler = self._faults, self._scheduler
        if faults.die_after is not None and scheduler.counters.finished >= faults.die_after:
            raise SchedulerDiedError(
                "serving", "RuntimeError", "CUDA error: an illegal memory access was encountered"
            )
        if faults.die_under_load and sum(1 for job in scheduler.running if not job.probe) > 1:
            raise SchedulerDiedError(
                "serving", "RuntimeError", "CUDA error: an illegal memory access was encountered"
            )

    async def _die(self, failure: SchedulerDiedError) -> None:
        """The scheduler is gone: SGLang's main process says so, waits, and kills itself."""
        place = "srt/managers/scheduler.py"
        self._log.line(
            f"Scheduler hit an exception: {logs.traceback_of(failure.kind, failure.message, place)}"
        )
        self._log.line("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
        self._state = "dead"
        await self._sleep(_DEATH_S)
        os.kill(os.getpid(), signal.SIGKILL)

    async def _warm_up(self) -> None:
        """The request that SGLang sends itself before it calls itself ready."""
        if "warm-up" in self._faults.hang:
            return
        if "warm-up" in self._faults.die:
            await self._die(SchedulerDiedError("warm-up", "RuntimeError", "injected failure during warm-up"))
            return
        await self._sleep(1.0 * self._faults.slow_start)
        if self._settings.warm_up and not self._faults.dead_scheduler:
            job = Job(prompt_tokens=4, new_tokens=8, probe=True, fingerprint=1)
            self._submit(job)
            while job.finished_s is None:
                await self._sleep(0.1)
                if self._state == "dead":
                    return
        self._state = "ready"
        self._log.line("The server is fired up and ready to roll!")

    def _submit(self, job: Job) -> None:
        if self._faults.dead_scheduler:
            return
        try:
            self._scheduler.submit(job, self._now_s())
        except SchedulerDiedError as failure:
            self._spawn(self._die(failure))
            return
        self._wake.set()

    # --- signals ----------------------------------------------------------------------------------------------

    def _on_sigterm(self) -> None:
        if not self._faults.ignore_sigterm:
            if not self._term_asked:
                self._log.line(
                    "SIGTERM received. signum=15, frame=None. Draining requests and shutting down..."
                )
            self._term_asked = True

    async def _watch_for_end(self) -> None:
        """Every five seconds, SGLang looks whether it was told to go; then it drains, however long that takes."""
        while True:
            await self._sleep(_SIGTERM_POLL_S)
            if not self._term_asked:
                continue
            self._state = "draining"
            left = [reply.rid for reply in self._replies.values()]
            self._log.line(
                f"Gracefully exiting... Remaining number of requests {len(left)}. Remaining requests "
                f"remaining_rids={left}."
            )
            if not left or os.environ.get("SGL_FORCE_SHUTDOWN") == "1":
                self._end(0)
                return

    def _on_sigint(self) -> None:
        self._spawn(self._interrupt())

    async def _interrupt(self) -> None:
        """Wait for open answers; an idle server dies of the signal itself."""
        if self._replies:
            while self._replies:
                await self._sleep(0.2)
            self._end(0)
            return
        await self._sleep(0.4)
        self._log.raw("Traceback (most recent call last):\nKeyboardInterrupt\n")
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)

    def _end(self, status: int) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(status)

    # --- HTTP -------------------------------------------------------------------------------------------------

    def _answer(self, request: Request, connection: Connection) -> None:
        key = self._settings.api_key
        if (
            key is not None
            and request.path not in _OPEN_PATHS
            and request.headers.get("authorization") != f"Bearer {key}"
        ):
            self._reply(request, connection, 401, {"error": "Unauthorized"})
            return
        routes: dict[str, tuple[str, Callable[[Request, Connection], None]]] = {
            "/health": ("GET", self._health),
            "/health_generate": ("GET", self._health),
            "/ready": ("GET", self._ready),
            "/v1/models": ("GET", self._models),
            "/server_info": ("GET", self._server_info),
            "/get_server_info": ("GET", self._server_info),
            "/model_info": ("GET", self._model_info),
            "/get_model_info": ("GET", self._model_info),
            "/metrics": ("GET", self._metrics),
            "/flush_cache": ("GET POST", self._flush),
            "/v1/loads": ("GET", self._loads),
            "/abort_request": ("POST", self._abort),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completions),
            "/generate": ("POST", self._generate),
        }
        known = routes.get(request.path)
        hidden = (request.path == "/metrics" and not self._settings.enable_metrics) or (
            request.path == "/ready" and self._settings.release < (0, 5, 20)
        )
        if known is None or hidden:
            self._reply(request, connection, 404, {"detail": "Not Found"})
        elif request.method not in known[0].split():
            self._reply(request, connection, 405, {"detail": "Method Not Allowed"})
        else:
            try:
                known[1](request, connection)
            except BadRequestError as problem:
                self._reply(
                    request,
                    connection,
                    400,
                    {
                        "object": "error",
                        "message": str(problem),
                        "type": "BadRequestError",
                        "param": None,
                        "code": 400,
                    },
                )

    def _reply(
        self,
        request: Request,
        connection: Connection,
        status: int,
        body: object,
        content_type: str = "application/json",
    ) -> None:
        phrase = {
            200: "OK",
            400: "Bad Request",
            401: "Unauthorized",
            404: "Not Found",
            503: "Service Unavailable",
        }
        self._log.access(
            f'{connection.peer} - "{request.method} {request.path} HTTP/1.1" {status} {phrase.get(status, "")}'.rstrip()
        )
        connection.respond(status, body, content_type=content_type)

    def _health(self, request: Request, connection: Connection) -> None:
        if self._state in ("starting", "draining"):
            self._reply(request, connection, 503, "", "text/plain")
        else:
            self._spawn(self._probe(request, connection))

    async def _probe(self, request: Request, connection: Connection) -> None:
        """Generate one token unless something runs, and look once a second whether anything came."""
        asked = self._now_s()
        if self._scheduler.idle and self._state == "ready":
            self._submit(Job(prompt_tokens=1, new_tokens=1, probe=True))
        for _ in range(_HEALTH_TIMEOUT_S):
            await self._sleep(1.0)
            if not connection.open:
                return
            if self._last_output_s >= asked:
                self._healthy = True
                self._reply(request, connection, 200, "", "text/plain")
                return
        self._healthy = False
        self._log.line(
            f"Health check failed. Server couldn't get a response from detokenizer for last {_HEALTH_TIMEOUT_S} "
            f"seconds. tic start time: {time.strftime('%H:%M:%S')}. last_heartbeat time: {time.strftime('%H:%M:%S')}"
        )
        self._reply(request, connection, 503, "", "text/plain")

    def _ready(self, request: Request, connection: Connection) -> None:
        good = self._state == "ready" and self._healthy
        self._reply(request, connection, 200 if good else 503, "", "text/plain")

    def _models(self, request: Request, connection: Connection) -> None:
        name = self._settings.served_model_name
        self._reply(
            request,
            connection,
            200,
            {
                "object": "list",
                "data": [
                    {
                        "id": name,
                        "object": "model",
                        "created": int(time.time()),
                        "owned_by": "sglang",
                        "root": name,
                        "parent": None,
                        "max_model_len": self._settings.context_length,
                    }
                ],
            },
        )

    def _model_info(self, request: Request, connection: Connection) -> None:
        settings = self._settings
        self._reply(
            request,
            connection,
            200,
            {
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
            },
        )

    def _server_info(self, request: Request, connection: Connection) -> None:
        self._reply(request, connection, 200, self.info())

    def info(self) -> dict[str, object]:
        """What /server_info says."""
        up, settings, scheduler = self._up, self._settings, self._scheduler
        state: dict[str, object] = {
            **self._arguments,
            "last_gen_throughput": scheduler.last_throughput,
            "effective_max_running_requests_per_dp": up.pools.running,
            "memory_usage": {
                "weight": round(up.weights_gib, 3),
                "kvcache": round(up.pools.kv, 3),
                "token_capacity": up.pools.tokens,
                "token_capacity_swa": None,
                "startup_available": round(up.free_gib, 3),
                "graph": {
                    "prefill": round(up.prefill_graph_gib, 3),
                    "decode": 0.0 if settings.speculation else round(up.verify_graph.gib, 3),
                    "target_verify": round(up.verify_graph.gib, 3) if settings.speculation else 0.0,
                    "draft_prefill": 0.0,
                    "draft_decode": round(up.draft_graph.gib, 3),
                    "draft_extend": 0.0,
                },
            },
            "startup_time": up.timings_s.get("scheduler_e2e"),
        }
        if settings.release >= (0, 5, 21):
            state["decode_cuda_graph_bs"] = list(up.verify_graph.sizes)
            state["decode_cuda_graph_memory_gb"] = round(up.verify_graph.gib, 3)
            state["disaggregation_mode"] = "null"
        verified = scheduler.counters.verify_steps
        if verified:
            state["avg_spec_accept_length"] = scheduler.counters.accepted / verified
        total = settings.card.memory_mib
        return {
            **self._arguments,
            "status": "ready",
            "version": settings.version,
            "max_total_num_tokens": up.pools.tokens,
            "max_req_input_len": self._max_input(),
            "internal_states": [state],
            "simulator": {
                "card": settings.card.id,
                "seed": self._seed,
                "time_scale": self._scale,
                "vram_used_mib": round(total - scheduler.free_gib * 1024),
                "vram_total_mib": total,
            },
        }

    def _metrics(self, request: Request, connection: Connection) -> None:
        text = render(self._scheduler, self._timings)
        self._reply(request, connection, 200, text, "text/plain; version=0.0.4; charset=utf-8")

    def _flush(self, request: Request, connection: Connection) -> None:
        if self._scheduler.idle:
            self._scheduler.cache.clear()
            self._log.line("Cache flushed successfully!")
            text = "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the operation will not be performed.)\n"
            self._reply(request, connection, 200, text, "text/plain")
        else:
            self._reply(request, connection, 400, "Flush cache failed.\n", "text/plain")

    def _loads(self, request: Request, connection: Connection) -> None:
        scheduler = self._scheduler
        load = {
            "dp_rank": 0,
            "num_running_reqs": len(scheduler.running),
            "num_waiting_reqs": len(scheduler.waiting),
            "num_used_tokens": scheduler.used_tokens,
            "max_total_num_tokens": self._up.pools.tokens,
            "token_usage": scheduler.used_tokens / self._up.pools.tokens,
        }
        self._reply(request, connection, 200, {"loads": [load]})

    def _abort(self, request: Request, connection: Connection) -> None:
        body = _json_object(request)
        rid = body.get("rid")
        for reply in list(self._replies.values()):
            if body.get("abort_all") or (rid and reply.rid == rid):
                self._drop(reply)
                reply.connection.close()
        self._reply(request, connection, 200, "", "text/plain")

    def _max_input(self) -> int:
        return min(self._settings.context_length - 1, self._up.pools.tokens - 1) - 5

    # --- generation -------------------------------------------------------------------------------------------

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
        prompt = "".join(parts)
        tokens = sum(count_tokens(part) + 4 for part in parts) + _CHAT_TOKENS
        limit = body.get("max_completion_tokens")
        limit = body.get("max_tokens") if limit is None else limit
        self._begin(request, connection, body, "chat", prompt, tokens, limit, None)

    def _completions(self, request: Request, connection: Connection) -> None:
        body = _json_object(request)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, list) and prompt and all(isinstance(one, int) for one in prompt):
            text, tokens = " ".join(map(str, prompt)), len(prompt)
        elif isinstance(prompt, str):
            text, tokens = prompt, max(1, count_tokens(prompt))
        else:
            raise BadRequestError("prompt: a text or a list of token ids")
        self._begin(request, connection, body, "text", text, tokens, body.get("max_tokens"), 16)

    def _generate(self, request: Request, connection: Connection) -> None:
        body = _json_object(request)
        text, ids = body.get("text"), body.get("input_ids")
        if isinstance(text, str):
            tokens = max(1, count_tokens(text))
        elif isinstance(ids, list) and ids and all(isinstance(one, int) for one in ids):
            text, tokens = " ".join(map(str, ids)), len(ids)
        else:
            raise BadRequestError("Either text or input_ids should be provided.")
        params = body.get("sampling_params") or {}
        if not isinstance(params, dict):
            raise BadRequestError("sampling_params: an object")
        merged = {**params, "stream": body.get("stream"), "rid": body.get("rid")}
        self._begin(request, connection, merged, "generate", text, tokens, params.get("max_new_tokens"), 128)

    def _begin(
        self,
        request: Request,
        connection: Connection,
        body: Mapping[str, object],
        dialect: str,
        prompt: str,
        tokens: int,
        limit: object,
        default: int | None,
    ) -> None:
        settings = self._settings
        context = settings.context_length
        if limit is None:
            limit = default if default is not None else max(1, context - tokens - 1)
        elif not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise BadRequestError(f"max_tokens must be a positive whole number, got {limit!r}")
        elif tokens + limit > context:
            raise BadRequestError(
                f"Requested token count exceeds the model's maximum context length of {context} tokens. You "
                f"requested a total of {tokens + limit} tokens: {tokens} tokens from the input messages and {limit} "
                "tokens for the completion. Please reduce the number of tokens in the input messages or the "
                "completion to fit within the limit."
            )
        if tokens > self._max_input():
            raise BadRequestError(
                f"Input length ({tokens} tokens) exceeds the maximum allowed length ({self._max_input()} tokens). "
                "Use a shorter input or enable --allow-auto-truncate."
            )
        queued = settings.max_queued_requests
        if queued is not None and len(self._scheduler.waiting) >= queued:
            self._reply(
                request,
                connection,
                503,
                {
                    "object": "error",
                    "message": "The request queue is full.",
                    "type": "ServiceUnavailableError",
                    "param": None,
                    "code": 503,
                },
            )
            return
        mark = fingerprint(prompt)
        room = min(context, self._up.pools.tokens) - tokens - 1
        natural = _NATURAL_TOKENS[0] + mark % _NATURAL_TOKENS[1]
        wanted = max(1, min(limit, room))
        stops = not body.get("ignore_eos") and natural < wanted
        job = Job(
            prompt_tokens=tokens,
            new_tokens=natural if stops else wanted,
            task=task_of(prompt),
            fingerprint=mark,
            boundaries=prefixes(prompt, tokens, self._cache_step()) if settings.radix_cache else (),
            stops_by_itself=stops,
        )
        options = body.get("stream_options")
        usage = settings.usage_by_default or (
            isinstance(options, dict) and bool(options.get("include_usage"))
        )
        fault = "garbage" if self._faults.garbage else "repeat" if self._faults.repeat else ""
        rid = body.get("rid")
        reply = Reply(
            job=job,
            connection=connection,
            answer=Answer(prompt, self._seed, fault),
            settings=settings,
            dialect=dialect,
            stream=bool(body.get("stream")),
            with_usage=usage,
            usage_error=max(7, job.new_tokens // 2) if self._faults.wrong_usage else 0,
            stall_after=self._faults.stall,
            rid=rid if isinstance(rid, str) and rid.isalnum() else uuid.uuid4().hex,
        )
        self._replies[job.id] = reply
        connection.on_close = lambda: self._drop(reply)
        self._log.access(f'{connection.peer} - "{request.method} {request.path} HTTP/1.1" 200 OK')
        self._submit(job)

    def _cache_step(self) -> int:
        hybrid = self._settings.target.linear is not None
        return self._settings.mamba_track_interval if hybrid else 64

    def _drop(self, reply: Reply) -> None:
        """The client went away: its slot is free from the next step on."""
        self._replies.pop(reply.job.id, None)
        self._scheduler.abort(reply.job)
        self._wake.set()


def _json_object(request: Request) -> dict[str, object]:
    try:
        body = json.loads(request.body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"Invalid request body: {error}") from None
    if not isinstance(body, dict):
        raise BadRequestError("Invalid request body: a JSON object is expected")
    return body


def _content(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))
    raise BadRequestError("messages: content is a text or a list of parts")


def serve(
    up: Up,
    *,
    seed: int,
    time_scale: float,
    faults: Faults,
    arguments: Mapping[str, object],
    log: logs.Log,
) -> int:
    """Run a server until a signal ends it; the process's exit status."""

    async def main() -> int:
        server = Server(up, seed=seed, time_scale=time_scale, faults=faults, arguments=arguments, log=log)
        return await server.run()

    with contextlib.suppress(KeyboardInterrupt):
        return asyncio.run(main())
    return 130

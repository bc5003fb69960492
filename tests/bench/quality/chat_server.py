"""A chat server that answers as a test tells it, without streaming."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from dflash_deploy.bench.quality.exam import sheet
from dflash_deploy.bench.workloads import Message, load_all


@dataclass
class Told:
    """What to answer: words or a call, or a status with a body."""

    text: str = ""
    tool: str | None = None
    arguments: str = ""
    status: int = 200
    raw: bytes | None = None
    tokens: int | None = None
    ids: tuple[int, ...] | None = None
    ended: bool = True
    thoughts: str | None = None


@dataclass
class Seen:
    bodies: list[dict] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    now: int = 0
    most: int = 0


Answering = Callable[[dict, int], Told]


@contextmanager
def answering(answer: Answering) -> Iterator[tuple[str, Seen]]:
    """``answer`` is given the request's body and how often its messages were asked before."""
    seen = Seen()
    lock = threading.Lock()
    times: dict[str, int] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one packet, else each answer waits for an acknowledgement

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            key = json.dumps(body["messages"])
            with lock:
                seen.bodies.append(body)
                seen.headers.append(dict(self.headers))
                seen.now += 1
                seen.most = max(seen.most, seen.now)
                before = times[key] = times.get(key, -1) + 1
            told = answer(body, before)
            data = told.raw
            if data is None:
                data = json.dumps(completion(told, body["max_tokens"])).encode()
            with lock:
                seen.now -= 1
            self.send_response(told.status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def completion(told: Told, most: int) -> dict:
    message: dict[str, object] = {"role": "assistant", "content": told.text}
    if told.tool is not None:
        function = {"name": told.tool, "arguments": told.arguments}
        message |= {"content": None, "tool_calls": [{"type": "function", "function": function}]}
    if told.thoughts is not None:
        message["reasoning"] = told.thoughts
    choice = {"index": 0, "message": message, "finish_reason": "stop" if told.ended else "length"}
    if told.ids is not None:
        choice["token_ids"] = list(told.ids)
    tokens = (
        told.tokens
        if told.tokens is not None
        else min(most, max(1, len((told.thoughts or "") + told.text) // 4))
    )
    return {"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": tokens}}


BY_MESSAGES = {prompt.messages: prompt for prompt in load_all()} | {
    prompt.messages: prompt for talk in sheet().talks for prompt in talk
}
ESSAY = {"en": "", "zh-TW": ""}
for _prompt in load_all():
    if _prompt.task == "prose" and _prompt.reference and _prompt.language:
        ESSAY[_prompt.language] += _prompt.reference + "\n\n"


def good(body: dict, _before: int = 0) -> Told:
    """What a model that knows everything would say."""
    messages = tuple(Message(one["role"], one["content"]) for one in body["messages"])
    prompt = BY_MESSAGES.get(messages)
    if prompt is None:
        return Told(messages[-1].content.split("\n\n", 1)[1])  # to be copied
    if prompt.tool is not None:
        return Told(tool=str(prompt.tool["name"]), arguments=prompt.reference or "")
    return Told(prompt.reference or f"{prompt.id}. {ESSAY[prompt.language or 'en'][:900]}")

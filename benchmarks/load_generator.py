"""How exact the load generator is, and what it costs beside other clients.

    python benchmarks/load_generator.py
    python benchmarks/load_generator.py --bench-serving auto --guidellm ~/.cache/guidellm

A server on raw sockets, in a process of its own, sends one token of every running stream at each tick of 5
ms, as an engine does at each step, and writes into every token when it sent it. The first table compares
those times with what our client says that it saw, and a plain httpx client doing the same. The second runs
one load by several clients and gives the processor time that each takes for 1,000 streamed tokens, all its
processes together, from its first request to its last answer (starting and importing are left out), and the
speed that each reports. The last of them is no client: a loop that notes when bytes came and understands
none, which is as little as timing every token can cost in Python on this machine.

``--bench-serving`` takes the interpreter of an environment with SGLang (``auto``: that of the tests' real
lane), ``--guidellm`` a folder in which an environment with guidellm lies or is made.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import select
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, cast

import httpx
import psutil

from dflash_deploy.bench.chat import Sampling
from dflash_deploy.bench.endpoint import Endpoint
from dflash_deploy.bench.load import Load, Player
from dflash_deploy.bench.measurement import LoadFigures, RequestResult, percentile
from dflash_deploy.bench.transport import Patience
from dflash_deploy.bench.workloads.prompt import ask

TICK_S = 0.005
FIRST_WAIT_S = 0.05
STREAMS = 64
STAMPED_TOKENS = 600
ARRIVALS_S = [0.01 * number for number in range(STREAMS)]
"""One by one, so that the server reads each request as it comes; soon all run, for over two seconds."""

TOKENS = 200
USERS = 16
REQUESTS = 16 * USERS
PAUSE_S = 1.0
"""Longer without a stream, and a client has not begun yet or is done."""

ROOT = Path(__file__).resolve().parents[1]


# --- The server


@dataclass
class Stream:
    """One request that is being answered."""

    connection: socket.socket
    stamped: bool
    asked: float
    tokens: int
    due: float
    sent: int = 0


def serve(listener: socket.socket, tick_s: float) -> None:
    """Answer until the process is ended."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    unread: dict[socket.socket, bytes] = {}
    streams: list[Stream] = []
    next_tick = time.monotonic()
    busy = False
    while True:
        if busy != bool(streams):
            busy = not busy
            print("+" if busy else "-", flush=True)
        left = next_tick - time.monotonic()
        for key, _ in selector.select(max(0.0, left) if streams else None):
            connection = cast("socket.socket", key.fileobj)
            if connection is listener:
                accepted, _ = listener.accept()
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                selector.register(accepted, selectors.EVENT_READ)
                unread[accepted] = b""
                continue
            try:
                data = connection.recv(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                selector.unregister(connection)
                streams = [one for one in streams if one.connection is not connection]
                del unread[connection]
                connection.close()
                continue
            unread[connection] += data
            request, unread[connection] = cut_request(unread[connection])
            if request is not None and (stream := begin(connection, *request)):
                if not streams:
                    next_tick = time.monotonic()
                streams.append(stream)
        now = time.monotonic()
        if streams and now >= next_tick:
            streams = [one for one in streams if step(one, now)]
            next_tick = max(next_tick + tick_s, now)


def cut_request(data: bytes) -> tuple[tuple[bytes, bytes] | None, bytes]:
    head, end, rest = data.partition(b"\r\n\r\n")
    if not end:
        return None, data
    length = 0
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    if len(rest) < length:
        return None, data
    return (head, rest[:length]), rest[length:]


def begin(connection: socket.socket, head: bytes, body: bytes) -> Stream | None:
    if not head.startswith(b"POST /v1/chat/completions"):
        known = head.startswith((b"GET /v1/models", b"GET /health"))
        answer = json.dumps({"object": "list", "data": [{"id": "words", "object": "model"}]}).encode()
        status = b"200 OK" if known else b"404 Not Found"
        connection.sendall(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(answer), answer))
        return None
    asked = json.loads(body)
    now = time.monotonic()
    connection.sendall(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    tokens = asked.get("max_tokens") or asked.get("max_completion_tokens") or TOKENS
    return Stream(connection, asked["model"] == "stamped", now, tokens, now + FIRST_WAIT_S)


def step(stream: Stream, now: float) -> bool:
    """Send the stream's next token if it is due; False after the last."""
    if now < stream.due:
        return True
    stream.sent += 1
    last = stream.sent == stream.tokens
    data = STAMPED % (stream.asked, time.monotonic()) if stream.stamped else WORD
    if last:
        usage = {"prompt_tokens": 8, "completion_tokens": stream.tokens, "total_tokens": stream.tokens + 8}
        data += chunk(event("", usage)) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    try:
        stream.connection.sendall(data)
    except OSError:
        return False
    return not last


def event(text: str, usage: object = None) -> bytes:
    """As SGLang writes it."""
    delta = {"role": None, "content": text, "reasoning_content": None, "tool_calls": None}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "matched_stop": None}
    content = {
        "id": "b1946ac92492d2347c6235b4d2611184",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "words",
        "choices": [] if usage else [choice],
        "usage": usage,
    }
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


WORD = chunk(event(" word"))
# The length of a chunk stands before it, and a stamp is as long as this whatever it says.
STAMPED = chunk(event("x" * 36)).replace(b"x" * 36, b"%017.6f/%017.6f ")


@dataclass
class Served:
    """The server in a process of its own.

    Attributes:
        url: its address.
        client: the process whose work is added up.
        spent_s: its processor time while streams were open, pauses of less than ``PAUSE_S`` among them.
    """

    url: str
    client: psutil.Process | None = None
    spent_s: float = 0.0

    def watch(self, told: IO[str]) -> None:
        begun = last = 0.0
        ended = -PAUSE_S
        for line in told:
            if self.client is None:
                ended = -PAUSE_S
                continue
            now, spent = time.monotonic(), spent_by(self.client)
            if line.strip() == "+":
                begun = last if now - ended < PAUSE_S else spent
            else:
                self.spent_s += spent - begun
                ended, last = now, spent


def spent_by(client: psutil.Process) -> float:
    """Processor time of a process and of all its children, those that have ended among them."""
    total = 0.0
    with suppress(psutil.Error):
        for process in (client, *client.children(recursive=True)):
            with suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
    return total


@contextmanager
def server(tick_s: float = TICK_S) -> Iterator[Served]:
    """The server in a process of its own."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        command = [sys.executable, __file__, "--serve", str(listener.fileno()), str(tick_s)]
        with subprocess.Popen(
            command, pass_fds=[listener.fileno()], stdout=subprocess.PIPE, text=True
        ) as process:
            served = Served(f"http://127.0.0.1:{listener.getsockname()[1]}")
            watch = threading.Thread(target=served.watch, args=(process.stdout,))
            watch.start()
            try:
                yield served
            finally:
                process.kill()
                watch.join()


# --- Exactness


@dataclass(frozen=True)
class Errors:
    """By how much a client's times differ from the server's, in milliseconds."""

    ttft_ms: list[float]
    inter_token_ms: list[float]

    @classmethod
    def of(cls, answers: list[tuple[str, float, list[float]]]) -> Errors:
        """From the stamped text, the TTFT and the arrival times of every answer."""
        ttft, waits = [], []
        for text, ttft_s, at_s in answers:
            stamps = [tuple(map(float, word.split("/"))) for word in text.split()]
            asked, first = stamps[0]
            ttft.append(1000 * abs(ttft_s - (first - asked)))
            seen = [later - earlier for earlier, later in pairwise(at_s)]
            true = [later[1] - earlier[1] for earlier, later in pairwise(stamps)]
            waits += [1000 * abs(one - other) for one, other in zip(seen, true, strict=True)]
        return cls(ttft, waits)

    def row(self, name: str, cpu_s: float, tokens: int) -> str:
        figures = [
            percentile(sorted(values), share)
            for values in (self.ttft_ms, self.inter_token_ms)
            for share in (0.5, 0.99, 1.0)
        ]
        cells = "".join(f"{figure:9.3f}" for figure in figures)
        return f"{name:<22}{cells}{1000 * cpu_s / (tokens / 1000):12.1f}"


def ours_stamped(url: str) -> list[tuple[str, float, list[float]]]:
    load = Load(Endpoint(url, "stamped"), [ask("Count.")], Sampling(STAMPED_TOKENS), Patience(30, 300))
    results = sound(asyncio.run(Player(load).open(ARRIVALS_S)))
    return [(one.text, one.ttft_s, list(one.chunk_s)) for one in results]


def httpx_stamped(url: str) -> list[tuple[str, float, list[float]]]:
    return asyncio.run(by_httpx(url))


async def by_httpx(url: str) -> list[tuple[str, float, list[float]]]:
    body = {"model": "stamped", "messages": [], "max_tokens": STAMPED_TOKENS, "stream": True}

    async def one(client: httpx.AsyncClient, arrival_s: float) -> tuple[str, float, list[float]]:
        await asyncio.sleep(arrival_s)
        text, at_s, begun = "", [], time.perf_counter()
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    choices = json.loads(line[6:])["choices"]
                    if choices:
                        text += choices[0]["delta"]["content"]
                        at_s.append(now - begun)
        return text, at_s[0], at_s

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=60, trust_env=False, verify=False) as client:  # noqa: S501
        return list(await asyncio.gather(*(one(client, arrival_s) for arrival_s in ARRIVALS_S)))


async def played(url: str, model: str, users: int, requests: int, tokens: int) -> list[RequestResult]:
    load = Load(Endpoint(url, model), [ask("Count.")], Sampling(tokens), Patience(30, 300))
    return sound(await Player(load).closed(users, requests=requests))


def sound(results: list[RequestResult]) -> list[RequestResult]:
    failed = [one.error for one in results if one.error]
    if failed:
        sys.exit(f"{len(failed)} requests failed, for one: {failed[0]}")
    return results


def exactness() -> None:
    rate = 1 / TICK_S
    print(f"\n{STREAMS} streams of {STAMPED_TOKENS} tokens at {rate:.0f} tokens/s each, in step (measured)")
    print(f"{'':<22}{'TTFT error, ms':>27}{'inter-token error, ms':>27}{'CPU ms per':>12}")
    print(f"{'client':<22}{2 * ('   median      p99      max')}{'1,000 tokens':>13}")
    clients: list[tuple[str, Callable[[str], list[tuple[str, float, list[float]]]]]] = [
        ("dflash-deploy", ours_stamped),
        ("httpx, streaming", httpx_stamped),
    ]
    for name, run in clients:
        with server() as served:
            run(served.url)  # imports, memory
            begun = time.process_time()
            answers = run(served.url)
            cpu_s = time.process_time() - begun
        print(Errors.of(answers).row(name, cpu_s, STREAMS * STAMPED_TOKENS))


# --- Side by side


Client = Callable[[Served], float]
"""Plays the load and returns the tokens/s that it reports."""


def run(served: Served, command: list[str], environment: dict[str, str]) -> str:
    """Run a client as a program; what it prints."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT
        )
        served.client, served.spent_s = psutil.Process(process.pid), 0.0
        status = process.wait()
        served.client = None
        output.seek(0)
        said = output.read()
    if status:
        sys.exit(f"{' '.join(command[:4])}: exit status {status}\n{said[-4000:]}")
    return said


def ours(served: Served) -> float:
    return float(run(served, [sys.executable, __file__, "--client", served.url], {}).split()[-1])


def bare(served: Served) -> float:
    return float(run(served, [sys.executable, __file__, "--bare", served.url], {}).split()[-1])


def read_only(url: str) -> float:
    """Play the load, note when every piece came, and look into none; tokens/s."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    body = json.dumps({"model": "words", "messages": [], "max_tokens": TOKENS, "stream": True}).encode()
    request = b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    epoll = select.epoll()
    streams: dict[int, tuple[socket.socket, list[bytes], list[float]]] = {}
    left = REQUESTS

    def begin_one() -> None:
        nonlocal left
        if not left:
            return
        left -= 1
        connection = socket.create_connection((host, int(port)))
        streams[connection.fileno()] = (connection, [], [])
        epoll.register(connection.fileno(), select.EPOLLIN)
        connection.sendall(request)

    begun = time.perf_counter()
    for _ in range(USERS):
        begin_one()
    while streams:
        for descriptor, _ in epoll.poll():
            connection, pieces, at_s = streams[descriptor]
            data = os.read(descriptor, 1 << 14)
            pieces.append(data)
            at_s.append(time.perf_counter())
            if data.endswith(b"0\r\n\r\n"):
                epoll.unregister(descriptor)
                del streams[descriptor]
                connection.close()
                begin_one()
    return REQUESTS * TOKENS / (time.perf_counter() - begun)


def bench_serving(python: str, folder: Path, model: Path) -> Client:
    # It imports the package "datasets" for data sets that are not used here.
    (folder / "stubs").mkdir()
    (folder / "stubs" / "datasets.py").write_text("def load_dataset(*_, **__): raise NotImplementedError\n")
    stubs = f"{folder / 'stubs'}:{ROOT / 'tests' / 'real' / 'stubs'}"

    def client(served: Served) -> float:
        report = folder / "bench_serving.jsonl"
        command = [
            *(
                python,
                "-m",
                "sglang.benchmark.serving",
                "--backend",
                "sglang-oai-chat",
                "--base-url",
                served.url,
            ),
            *("--dataset-name", "random-ids", "--tokenizer", str(model), "--model", "words"),
            *("--random-input-len", "8", "--random-output-len", str(TOKENS), "--random-range-ratio", "1"),
            *("--num-prompts", str(REQUESTS), "--max-concurrency", str(USERS)),
            *("--warmup-requests", "0", "--disable-tqdm", "--output-file", str(report)),
        ]
        environment = {"PYTHONPATH": stubs, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
        run(served, command, environment)
        return float(json.loads(report.read_text().splitlines()[-1])["output_throughput"])

    return client


def guidellm(environment: Path, folder: Path, model: Path) -> Client:
    program = environment / "bin" / "guidellm"
    if not program.exists():
        print(f"making {environment} with guidellm (once)", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        subprocess.run([environment / "bin" / "pip", "install", "--quiet", "guidellm"], check=True)
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"Count to {n}."}) + "\n" for n in range(1000)))

    def client(served: Served) -> float:
        report = folder / "guidellm.json"
        command = [
            *(str(program), "run", "--disable-console", "--backend"),
            f"kind=openai_http,target={served.url},model=words,request_format=/v1/chat/completions",
            *("--profile", f"kind=concurrent,streams={USERS}"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--tokenizer", f"kind=huggingface_auto,model={model}"),
            *("--data", f"kind=json_file,path={data}", "--output", f"kind=json,path={report}"),
        ]
        run(served, command, {"HF_HUB_OFFLINE": "1"})
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
        return float(benchmark["metrics"]["output_tokens_per_second"]["successful"]["mean"])

    return client


def side_by_side(clients: dict[str, Client]) -> None:
    print(f"\n{USERS} users, {REQUESTS} requests of {TOKENS} tokens (measured)")
    print(f"{'client':<22}{'CPU ms per 1,000 tokens':>25}{'times ours':>12}{'tokens/s':>12}{'to ours':>10}")
    first: tuple[float, float] | None = None
    with server() as served:
        for name, client in clients.items():
            speed = client(served)
            cost = 1000 * served.spent_s / (REQUESTS * TOKENS / 1000)
            first = first or (cost, speed)
            print(
                f"{name:<22}{cost:25.1f}{cost / first[0]:12.1f}{speed:12.1f}"
                f"{100 * (speed / first[1] - 1):+9.2f}%"
            )


def real_lane() -> tuple[str, Path]:
    sys.path.insert(0, str(ROOT))
    from tests.real.environment import make_tiny_model, serving_environment  # noqa: PLC0415

    environment = serving_environment()
    if not environment.complete:
        sys.exit("no environment with SGLang: make it with python tests/real/environment.py")
    return str(environment.python), make_tiny_model(environment)


def machine() -> str:
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return f"{cpu}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bench-serving", metavar="PYTHON", help="interpreter with SGLang, or auto")
    parser.add_argument(
        "--guidellm", metavar="FOLDER", type=Path, help="environment, made where it is missing"
    )
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(socket.socket(fileno=int(given.serve[0])), float(given.serve[1]))
    if given.client:
        results = asyncio.run(played(given.client, "words", USERS, REQUESTS, TOKENS))
        print(LoadFigures.of(results).total_tokens_per_s)
        return
    if given.bare:
        print(read_only(given.bare))
        return
    print(machine())
    exactness()
    clients: dict[str, Client] = {"dflash-deploy": ours}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if given.bench_serving or given.guidellm:
            python, model = real_lane()
            if given.bench_serving:
                interpreter = python if given.bench_serving == "auto" else given.bench_serving
                clients["sglang.bench_serving"] = bench_serving(interpreter, folder, model)
            if given.guidellm:
                clients["guidellm"] = guidellm(given.guidellm.expanduser(), folder, model)
        clients["reading, and no more"] = bare
        side_by_side(clients)


if __name__ == "__main__":
    main()

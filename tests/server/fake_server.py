"""A small server that behaves as told: SGLang's log lines, a health endpoint, and the trouble asked for."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

TROUBLES = (
    "die-loading",
    "exit-3",
    "linger",
    "silent",
    "chatter",
    "unhealthy",
    "lost-port",
    "ignore-sigterm",
    "fail-later",
    "slow-death",
    "last-words",
    "family",
    "megabytes",
    "odd-bytes",
    "shared-memory",
    "print-for-ever",
    "asks-itself",
)


def say(text: str) -> None:
    sys.stderr.write(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}\n")
    sys.stderr.flush()


def out_of_memory() -> None:
    say(
        "Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/site-packages/sglang/srt/managers/scheduler.py", line 100, in run_scheduler_process\n'
        "    scheduler = Scheduler(server_args)\n"
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. "
        "Current value: mem_fraction_static=0.1"
    )
    say("Received sigquit from a child process. It usually means the child failed.")


def start_family(pids: Path) -> None:
    """A child, and a grandchild in a session of its own; neither ends by itself or on SIGTERM."""
    sleep = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    code = (
        "import subprocess, sys\n"
        f"grandchild = subprocess.Popen([sys.executable, '-S', '-c', {sleep!r}], start_new_session=True)\n"
        "print(grandchild.pid, flush=True)\n" + sleep.replace("; ", "\n")
    )
    child = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True)
    grandchild = child.stdout.readline().strip()
    # Nothing ties this one to the server any more but that it prints to the same place.
    leave = (
        "import os, time\nos.setsid()\npid = os.fork()\n"
        "if pid:\n    print(pid)\nelse:\n    os.close(1)\n    time.sleep(600)\n"
    )
    stranger = subprocess.check_output([sys.executable, "-S", "-c", leave], env={}, text=True).strip()
    pids.write_text(f"{child.pid} {grandchild} {stranger}")


class Health(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--trouble", choices=TROUBLES)
    parser.add_argument("--notes", type=Path, help="folder to leave notes for the test in")
    parser.add_argument("--shared-memory", type=Path, default=Path("/dev/shm"))  # noqa: S108
    options = parser.parse_args()
    trouble = options.trouble
    if trouble in ("fail-later", "slow-death", "last-words"):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])

    signal.signal(
        signal.SIGTERM,
        signal.SIG_IGN if trouble in ("ignore-sigterm", "fail-later") else lambda *_: sys.exit(0),
    )
    if options.notes:
        (options.notes / "environ").write_text("\n".join(f"{k}={v}" for k, v in os.environ.items()))
        (options.notes / "pid").write_text(str(os.getpid()))
    say("server_args={'model_path': '/models/tiny', 'mem_fraction_static': 0.1}")
    if trouble == "family":
        start_family(options.notes / "family")
    if trouble == "odd-bytes":
        os.write(2, b"\xff\xfe not text \x00\n" + b"x" * 3_000_000 + b"\n\xc3\r\n\n")
    if trouble == "megabytes":
        for number in range(40_000):
            os.write(2, b"%06d " % number + b"." * 100 + b"\n")
    say("Init parallel begin.")
    say("Init parallel ends. elapsed=0.10 s")
    say("Load weight begin. avail mem=31.00 GB")
    match trouble:
        case "die-loading":
            out_of_memory()
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit-3":
            say("something went wrong")
            sys.exit(3)
        case "linger":
            out_of_memory()
            time.sleep(600)
        case "silent":
            time.sleep(600)
        case "chatter":
            while True:
                say("still thinking")
                time.sleep(0.1)
    say("Load weight end. elapsed=0.50 s, type=Qwen3ForCausalLM, avail mem=30.00 GB, mem usage=1.00 GB.")
    say("KV Cache is allocated. dtype: torch.bfloat16, #tokens: 8192, K size: 0.50 GB, V size: 0.50 GB")
    say("Memory pool end. avail mem=29.00 GB")
    say("Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, avail mem=29.00 GB")
    sys.stderr.write("\rCapturing batches (bs=2 avail_mem=28.90 GB):   0%|          | 0/2")
    sys.stderr.write("\rCapturing batches (bs=1 avail_mem=28.80 GB):  50%|#####     | 1/2\n")
    say("Capture target decode CUDA graph end. elapsed=1.00 s, mem usage=0.20 GB, avail mem=28.80 GB.")
    say(
        "max_total_num_tokens=8192, chunked_prefill_size=2048, max_prefill_tokens=16384, "
        "max_running_requests=4, context_len=4096, available_gpu_mem=28.80 GB"
    )
    if trouble == "lost-port":
        say(
            "ERROR: [Errno 98] error while attempting to bind on address "
            f"('127.0.0.1', {options.port}): address already in use"
        )
        time.sleep(600)
    if trouble == "shared-memory":
        held = (options.shared_memory / f"sglang_loads_{os.getpid():012x}_0badcafe.shm").open("wb")
        held.write(b"SLNS")
        held.flush()
        (Path(os.environ["TMPDIR"]) / "tmp12345678").touch()
    Health.status = 503 if trouble == "unhealthy" else 200
    server = ThreadingHTTPServer((options.host, options.port), Health, bind_and_activate=False)
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.server_bind()
    server.server_activate()
    Thread(target=server.serve_forever, daemon=True).start()
    if trouble == "asks-itself":
        # As SGLang does, by a client that takes the proxy of its environment.
        urllib.request.urlopen(f"http://{options.host}:{options.port}/health", timeout=60)
    say("The server is fired up and ready to roll!")
    if trouble == "fail-later":
        signal.sigwait([signal.SIGUSR1])
        out_of_memory()
    if trouble == "last-words":
        signal.sigwait([signal.SIGUSR1])
        out_of_memory()
        os.kill(os.getpid(), signal.SIGKILL)
    if trouble == "slow-death":
        # As a server whose card's memory has to be given back before the process is gone.
        signal.sigwait([signal.SIGUSR1])
        server.shutdown()
        server.server_close()
        signal.sigwait([signal.SIGUSR1])
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        if trouble == "print-for-ever":
            os.write(2, b"Decode batch " + b"." * 1000 + b"\n")
        time.sleep(0.005 if trouble == "print-for-ever" else 0.1)


if __name__ == "__main__":
    main()

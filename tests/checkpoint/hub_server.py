"""A hub on this machine: lists repositories and serves ranges of their files, as huggingface.co does."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Request:
    host: str
    path: str
    bytes_range: str | None
    authorization: str | None
    sent: int = 0


@dataclass
class Hub:
    """Folders by hub name, and what was asked of the hub."""

    repositories: dict[str, Path]
    endpoint: str = ""
    storage: str = ""
    status: int = 200
    ranges: bool = True
    listing: bytes | None = None
    cut_at: int | None = None
    requests: list[Request] = field(default_factory=list)

    def listed(self, name: str) -> bytes:
        if self.listing is not None:
            return self.listing
        files = sorted(self.repositories[name].iterdir())
        siblings = [
            {"rfilename": file.name, "size": file.stat().st_size, "blobId": "0" * 40} for file in files
        ]
        siblings.append({"rfilename": "../../etc/passwd", "size": 3})
        answer = {"id": name, "sha": COMMIT, "private": False, "downloads": 1, "likes": 1, "tags": []}
        return json.dumps(answer | {"siblings": siblings}).encode()


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Run the hub and, on another port, the storage that it sends downloads to."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            entry = Request(
                self.headers["Host"], path, self.headers.get("Range"), self.headers.get("Authorization")
            )
            hub.requests.append(entry)
            if hub.status != 200:
                self._send(hub.status, b"{}")
            elif match := re.fullmatch(r"/api/models/(.+)/revision/(.+)", path) or re.fullmatch(
                r"/api/models/([^/]+/[^/]+)()", path
            ):
                known = match[1] in hub.repositories and match[2] in ("", "main", "v1/x", COMMIT)
                self._send(200, hub.listed(match[1])) if known else self._send(404, b'{"error": "no"}')
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/([^/]+)", path):
                file = hub.repositories[match[1]] / match[3]
                if not file.exists():
                    self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
                    return
                headers = {"X-Repo-Commit": COMMIT, "ETag": '"x"', "X-Linked-Size": str(file.stat().st_size)}
                self._send(302, b"", headers | {"Location": f"{hub.storage}/storage/{match[1]}/{match[3]}"})
            elif match := re.fullmatch(r"/storage/([^/]+/[^/]+)/([^/]+)", path):
                self._send_file(hub.repositories[match[1]] / match[2], entry)
            else:
                self._send(404, b"")

        def _send_file(self, file: Path, entry: Request) -> None:
            size = file.stat().st_size
            start, end, status, headers = 0, size - 1, 200, {}
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", entry.bytes_range or "")
            if asked and hub.ranges:
                start, end = int(asked[1]), min(int(asked[2]), size - 1)
                status, headers = 206, {"Content-Range": f"bytes {start}-{end}/{size}"}
            with file.open("rb") as opened:
                opened.seek(start)
                body = opened.read(min(end - start + 1, 1 << 22))
            body = body[: hub.cut_at]
            entry.sent = len(body)
            self._send(status, body, headers)

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """A client may hang up once it has enough."""

    servers = [Server(("127.0.0.1", 0), Handler) for _ in range(2)]
    threads = [threading.Thread(target=server.serve_forever, args=(0.02,)) for server in servers]
    for thread in threads:
        thread.start()
    hub.endpoint, hub.storage = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    try:
        yield hub
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()

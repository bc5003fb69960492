"""Messages to a hook script and to an address, as they really arrive."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from dflash_deploy.deploy import notify
from dflash_deploy.profile.schema import Notify

TOLD = notify.message("down", "qwen", "it failed")


class _Listener(http.server.HTTPServer):
    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.got: list[tuple[str, dict[str, object]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook?token=sesame"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert isinstance(self.server, _Listener)
        self.server.got.append((self.path, json.loads(body)))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def listener() -> Iterator[_Listener]:
    server = _Listener()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def hook(folder: Path, body: str) -> list[str]:
    script = folder / "hook.sh"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return [str(script), str(folder)]


def test_a_script_gets_the_message_on_its_input(tmp_path: Path):
    assert notify.send(Notify(command=hook(tmp_path, 'cat > "$1/got"')), TOLD) == ()
    got = json.loads((tmp_path / "got").read_text())
    assert (got["event"], got["service"], got["why"]) == ("down", "qwen", "it failed")
    assert got["text"].endswith("qwen is down: it failed")
    assert got["at"]


def test_an_address_gets_it_by_post(listener: _Listener, tmp_path: Path):
    assert notify.send(Notify(url=listener.url), TOLD) == ()
    file = tmp_path / "url"
    file.write_text(listener.url + "\n")
    file.chmod(0o600)
    assert notify.send(Notify(url_file=file), TOLD) == ()
    assert [path for path, _ in listener.got] == ["/hook?token=sesame"] * 2
    assert listener.got[0][1]["event"] == "down"


def test_what_goes_wrong_is_a_sentence_without_the_address(listener: _Listener, tmp_path: Path):
    listener.status = 500
    (said,) = notify.send(Notify(url=listener.url), TOLD)
    assert "answered 500" in said
    file = tmp_path / "url"
    file.write_text("http://127.0.0.1:1/?token=sesame")
    (open_to_others,) = notify.send(Notify(url_file=file), TOLD)
    assert "chmod 600" in open_to_others
    file.chmod(0o600)
    (refused,) = notify.send(Notify(url_file=file), TOLD)
    assert "was not reached" in refused
    file.write_text("no address: sesame")
    (wrong,) = notify.send(Notify(url_file=file), TOLD)
    assert not any("sesame" in one for one in (said, open_to_others, refused, wrong))
    (absent,) = notify.send(Notify(url_file=tmp_path / "none"), TOLD)
    assert "cannot be read" in absent


@pytest.mark.parametrize(
    ("body", "said"), [("exit 3", "ended with status 3"), ("exec <&-; exit 0", None), ("kill -9 $$", "-9")]
)
def test_a_script_that_fails_is_told(tmp_path: Path, body: str, said: str | None):
    found = notify.send(Notify(command=hook(tmp_path, body)), TOLD)
    assert found == () if said is None else said in found[0]


def test_a_script_that_hangs_or_is_not_there_holds_nothing_up(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(notify, "_LIMIT_S", 0.3)
    began = time.monotonic()
    (said,) = notify.send(Notify(command=hook(tmp_path, 'echo $$ > "$1/pid"; sleep 600')), TOLD)
    assert "had not ended" in said
    assert time.monotonic() - began < 60
    (said,) = notify.send(Notify(command=["/no/such/hook"]), TOLD)
    assert "could not be started" in said


@pytest.mark.parametrize(
    "wrong",
    [{}, {"command": []}, {"command": ["hook"]}, {"url": "ftp://x"}, {"url": "http://a b"}, {"every_s": -1.0},
     {"url": "http://x", "url_file": "/x"}],
)  # fmt: skip
def test_what_names_nobody_is_refused(wrong: dict[str, object]):
    with pytest.raises(ValidationError):
        Notify.model_validate(wrong)

"""A headless Chromium, driven over a pipe by its own DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def find_chromium() -> str | None:
    """The program, None where there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@dataclass
class Page:
    """One page. ``complaints`` are what its console and the browser said that is worse than a note."""

    _out: Any
    _in: Any
    _session: str = ""
    _number: int = 0
    complaints: list[str] = field(default_factory=list)
    _loaded: bool = False

    def ask(self, method: str, **params: object) -> dict[str, Any]:
        """One command and its answer; what else the browser says meanwhile is noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._in.read(1)) != b"\0":
            assert byte, "the browser has ended"
            text += byte
        message = json.loads(text)
        params = message.get("params", {})
        match message.get("method"):
            case "Log.entryAdded" if params["entry"]["level"] in ("warning", "error"):
                self.complaints.append(params["entry"]["text"])
            case "Runtime.consoleAPICalled" if params["type"] in ("warning", "error", "assert"):
                self.complaints.append(str(params["args"]))
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Network.requestWillBeSent" if not params["request"]["url"].startswith(("file:", "data:")):
                self.complaints.append(f"asked for {params['request']['url']}")
            case "Page.loadEventFired":
                self._loaded = True
        return message

    def attach(self) -> None:
        """Make the page and listen to all that it says."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def close(self) -> None:
        """The browser, with all its processes."""
        self._session = ""
        self.ask("Browser.close")

    def show(self, path: Path, *, width: int, dark: bool = False, height: int = 900) -> None:
        """Open a file as a window of that width would."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        self.ask("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._next()

    def run(self, script: str) -> Any:
        """What a script comes to in the page; the page's own policy does not hold it."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self) -> bytes:
        """The whole page as a PNG."""
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(shot["data"])


@contextmanager
def chromium(program: str, folder: Path) -> Iterator[Page]:
    """A browser with a profile of its own; it ends with the block."""
    to_browser, ours_out = os.pipe()
    ours_in, from_browser = os.pipe()

    def place_pipes() -> None:
        # The protocol reads from descriptor 3 and writes to 4.
        spare = [os.dup(to_browser), os.dup(from_browser)]
        os.dup2(spare[0], 3)
        os.dup2(spare[1], 4)

    # Root has no sandbox of its own to give; the page is a file of ours.
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    process = subprocess.Popen(
        [
            program,
            "--headless=new",
            "--remote-debugging-pipe",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
            f"--user-data-dir={folder / 'chromium'}",
            *sandbox,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=place_pipes,  # noqa: PLW1509  (before any thread of ours)
        pass_fds=(3, 4),
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        with os.fdopen(ours_out, "wb") as out, os.fdopen(ours_in, "rb") as answers:
            page = Page(out, answers)
            page.attach()
            yield page
            page.close()
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

"""Checkpoints on a Hugging Face hub: its list of files, and ranges of them, over plain HTTP.

Only headers and small JSON files are fetched: a few megabytes of a checkpoint of any size.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import httpx

from dflash_deploy.checkpoint import json_text
from dflash_deploy.checkpoint.cards import doubt_of
from dflash_deploy.checkpoint.files import is_plain
from dflash_deploy.checkpoint.hub_cache import DEFAULT_REVISION, how_to_get, hugging_face_dir, is_commit
from dflash_deploy.checkpoint.json_text import Fields, invalid, shown
from dflash_deploy.errors import DeployError, ExitCode

_DEFAULT_ENDPOINT = "https://huggingface.co"
_MAX_LISTING_BYTES = 16 << 20
_LISTING_VALUES = 2_000_000
_MAX_TOKEN_BYTES = 4096
_TIMEOUT = httpx.Timeout(20.0, connect=8.0)
_DEADLINE_S = 120.0
# Headers of most shards are shorter, so that one request brings a shard's length and its header.
_AHEAD_BYTES = 256 << 10


@dataclass(frozen=True)
class HubFiles:
    """The files of one revision.

    Attributes:
        name: hub name.
        commit: the revision's full hash; what is read later is of the same state.
        sizes: bytes by file name, top of the repository only.
    """

    name: str
    commit: str
    sizes: dict[str, int]
    client: httpx.Client
    endpoint: str
    parallel_reads = 8
    _heads: dict[str, bytes] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """Hub name and revision."""
        return f"{self.name}@{self.commit[:8]}"

    def names(self) -> tuple[str, ...]:
        """Names at the top of the repository."""
        return tuple(sorted(self.sizes))

    def size(self, name: str) -> int:
        """Bytes of a file as the hub lists it."""
        if name not in self.sizes:
            raise DeployError(
                f"{self.where}: {shown(name)} is not among its files", exit_code=ExitCode.MISSING
            )
        return self.sizes[name]

    def read(self, name: str, start: int, length: int) -> bytes:
        """Part of a file; the first part is fetched with what follows it, and kept."""
        length = min(length, self.size(name) - start)
        if length <= 0:
            return b""
        if name not in self._heads and start + length <= _AHEAD_BYTES:
            self._heads[name] = self._fetch(name, 0, min(_AHEAD_BYTES, self.sizes[name]))
        head = self._heads.get(name, b"")
        if start + length <= len(head):
            return head[start : start + length]
        return self._fetch(name, start, length)

    def _fetch(self, name: str, start: int, length: int) -> bytes:
        url = f"{self.endpoint}/{self.name}/resolve/{self.commit}/{quote(name)}"
        headers = {"Range": f"bytes={start}-{start + length - 1}"}
        with _answer(self.client, url, headers, self.name) as response:
            told = response.headers.get(
                "Content-Range", f"bytes {start if response.status_code == 206 else 0}-"
            )
            if not told.startswith(f"bytes {start}-"):
                raise invalid(
                    f"{self.where}/{name}", "the hub does not serve the part of it that was asked for"
                )
            data = _body(response, length, self.name)
        if len(data) < length:
            raise DeployError(
                f"{self.where}/{name}: the hub sent {len(data):,} of {length:,} bytes",
                fix="try again",
                exit_code=ExitCode.UNAVAILABLE,
            )
        return data


@contextmanager
def open_repository(name: str, revision: str | None) -> Iterator[HubFiles]:
    """List a repository.

    Args:
        name: hub name.
        revision: branch, tag or commit; None for ``main``.

    Raises:
        DeployError: no such repository or revision (MISSING), no access or no connection (UNAVAILABLE).
    """
    endpoint = (os.environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT).rstrip("/")
    token = _token()
    headers = {"User-Agent": "dflash-deploy", "Accept-Encoding": "identity"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    with _client(headers) as client:
        url = f"{endpoint}/api/models/{name}/revision/{quote(revision or DEFAULT_REVISION, safe='')}"
        with _answer(client, f"{url}?blobs=true", {}, name) as response:
            data = _body(response, _MAX_LISTING_BYTES + 1, name)
        source = f"{endpoint} on {name}"
        if len(data) > _MAX_LISTING_BYTES:
            raise invalid(source, "the list of files is too long")
        listing = Fields(json_text.parse_object(data, source, max_values=_LISTING_VALUES), source)
        commit = listing.text("sha") or ""
        if not is_commit(commit):
            raise invalid(source, f"sha: expected a commit, found {shown(commit)!r}")
        yield HubFiles(name, commit, _sizes(listing, source), client, endpoint)


def _client(headers: dict[str, str]) -> httpx.Client:
    """A client that takes the proxy of the environment."""
    try:
        return httpx.Client(timeout=_TIMEOUT, follow_redirects=True, headers=headers)
    except (ImportError, httpx.InvalidURL, ValueError) as error:
        socks = isinstance(error, ImportError)
        raise DeployError(
            "the hub cannot be asked through the proxy of this shell: "
            + ("one by SOCKS needs the package socksio" if socks else shown(str(error))),
            fix="pip install socksio beside dflash-deploy and in SGLang's environment"
            if socks
            else "set http_proxy, https_proxy and all_proxy to http://HOST:PORT, and no_proxy to hosts and "
            "domains without networks by IPv6",
            exit_code=ExitCode.UNAVAILABLE,
        ) from error


def _sizes(listing: Fields, source: str) -> dict[str, int]:
    siblings = listing.values.get("siblings")
    if not isinstance(siblings, list):
        raise invalid(source, "siblings: expected a list of files")
    sizes: dict[str, int] = {}
    for sibling in siblings:
        entry = Fields(sibling if isinstance(sibling, dict) else {}, source, "siblings[].")
        name = entry.text("rfilename")
        size = entry.whole("size", least=0)
        if name and is_plain(name):
            if size is None:
                raise invalid(source, f"does not tell how large {name} is")
            sizes[name] = size
    return sizes


@contextmanager
def _answer(client: httpx.Client, url: str, headers: dict[str, str], name: str) -> Iterator[httpx.Response]:
    try:
        with client.stream("GET", url, headers=headers) as response:
            _check(response, name)
            yield response
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        reason = shown(str(error)) or type(error).__name__
        raise DeployError(
            f"{name} is not on this machine, and the hub cannot be reached: {reason}",
            fix=how_to_get(name),
            exit_code=ExitCode.UNAVAILABLE,
        ) from error


def _check(response: httpx.Response, name: str) -> None:
    match response.status_code:
        case 200 | 206:
            return
        case 401 | 403:
            message = f"the hub gives no access to {name}: it is private, gated or not there"
            fix = "accept its terms on its page, then `hf auth login` or set HF_TOKEN"
            raise DeployError(message, fix=fix, exit_code=ExitCode.UNAVAILABLE)
        case 404:
            raise DeployError(
                f"the hub has no {name}, or not in this revision",
                fix=doubt_of(name) or "check the name and the revision",
                exit_code=ExitCode.MISSING,
            )
        case status:
            raise DeployError(
                f"the hub answered {status} for {name}", fix="try again later", exit_code=ExitCode.UNAVAILABLE
            )


def _body(response: httpx.Response, most: int, name: str) -> bytes:
    """At most ``most`` bytes of an answer, whatever it says of its length."""
    parts: list[bytes] = []
    held = 0
    ends = time.monotonic() + _DEADLINE_S
    for part in response.iter_raw():
        parts.append(part[: most - held])
        held += len(parts[-1])
        if held >= most:
            break
        if time.monotonic() > ends:
            raise DeployError(
                f"the hub took longer than {_DEADLINE_S:.0f} s to answer for {name}",
                fix=how_to_get(name),
                exit_code=ExitCode.UNAVAILABLE,
            )
    return b"".join(parts)


def _token() -> str | None:
    """The person's token for the hub, as ``huggingface_hub`` finds it."""
    if os.environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return None
    token = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    if not token:
        try:
            file = Path(os.environ.get("HF_TOKEN_PATH") or hugging_face_dir() / "token").expanduser()
            if not file.is_file():
                return None
            with file.open("rb") as opened:
                token = opened.read(_MAX_TOKEN_BYTES).decode("ascii", "ignore")
        except (OSError, ValueError):
            return None
    token = token.strip()
    return token if token.isascii() and token.isprintable() and token else None

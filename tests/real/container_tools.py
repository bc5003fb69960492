"""The programs that read quadlets and compose files, without the engines behind them; downloaded once.

They are those of Ubuntu 24.04: the podman that most people have is older than some of the keys that its
documentation names today.
"""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import dataclass
from pathlib import Path

import httpx

from .environment import cache_root

_POOL = "http://archive.ubuntu.com/ubuntu/pool/universe/"


@dataclass(frozen=True)
class Package:
    """A package, and the program in it."""

    path: str
    sha256: str
    program: str

    def fetched(self) -> Path:
        """The program.

        Raises:
            httpx.HTTPError: the package cannot be had.
        """
        folder = cache_root() / "container-tools" / self.sha256[:12]
        if not folder.exists():
            content = httpx.get(_POOL + self.path, timeout=120, follow_redirects=True).raise_for_status()
            if hashlib.sha256(content.content).hexdigest() != self.sha256:
                raise httpx.DecodingError(f"{self.path} is not what it was")
            made = folder.with_name(f"{folder.name}.making")
            made.mkdir(parents=True, exist_ok=True)
            (made / "package.deb").write_bytes(content.content)
            subprocess.run(["dpkg-deb", "--extract", made / "package.deb", made], check=True)
            made.rename(folder)
        return folder / self.program


QUADLET = Package(
    "libp/libpod/podman_4.9.3+ds1-1build2_amd64.deb",
    "90c8b1120e60b6c8ea1ffcf473beb4de4602fff5e044b69f03adc4b3b63d969a",
    "usr/libexec/podman/quadlet",
)
COMPOSE = Package(
    "d/docker-compose-v2/docker-compose-v2_2.24.6+ds1-0ubuntu2_amd64.deb",
    "db03a75e26c64e45e8febfd8bff877f9a1c405a0888cde7bebdb17368c6a9908",
    "usr/libexec/docker/cli-plugins/docker-compose",
)

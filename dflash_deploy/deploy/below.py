"""What stands below an installed service at this moment, and where its hub's cache is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dflash_deploy.deploy.generations import Generation, Manager
from dflash_deploy.deploy.unit import UNIT_PREFIX
from dflash_deploy.deploy.versions import Versions, read_versions


def hub_home(manager: Manager, service: str, env: Mapping[str, str]) -> Path:
    """Where the service keeps what it fetches from the hub."""
    if named := env.get("HF_HOME"):
        return Path(named)
    if manager == "system":
        return Path("/var/cache") / f"{UNIT_PREFIX}{service}" / "huggingface"
    return Path(os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())


def versions_now(generation: Generation) -> Versions:
    """What stands below an installed generation at this moment."""
    hub = hub_home(generation.manager, generation.service, generation.env)
    return read_versions(Path(generation.argv[0]), generation.flags, hub=hub)

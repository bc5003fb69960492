"""Models by hub name that the person who installs has already: taken from there, not fetched again."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dflash_deploy.checkpoint import hub_cache
from dflash_deploy.deploy import access
from dflash_deploy.files import read_regular
from dflash_deploy.profile.schema import FlagSetting

_INDEX_LIMIT_BYTES = 64 << 20
_FLAGS = {"model-path": "revision", "speculative-draft-model-path": "speculative-draft-model-revision"}


@dataclass(frozen=True)
class Found:
    """Flags with folders in the place of hub names, and what is to be told of that."""

    flags: dict[str, FlagSetting]
    notes: tuple[str, ...]


def local(flags: Mapping[str, FlagSetting], who: access.Account) -> Found:
    """Put the folder of a whole snapshot where a hub name stands, if the account may read it.

    The service then starts without the network, with the very files that were tuned with.

    Args:
        flags: the engine's, by full name.
        who: the account that runs the service.
    """
    changed, notes = dict(flags), []
    for flag, revision in _FLAGS.items():
        name, wanted = flags.get(flag), flags.get(revision)
        if not isinstance(name, str) or not hub_cache.is_hub_name(name) or Path(name).is_dir():
            continue
        folder = _snapshot(name, wanted if isinstance(wanted, str) else None)
        if folder is None:
            continue
        refused = access.why_not(who, f"the model {name}", folder, files=_files(folder))
        if refused is not None:
            notes.append(
                f"{name} is fetched again for the service: {refused.message}\n"
                f"  to use that one: {refused.fix}"
            )
            continue
        changed[flag] = str(folder)
        changed.pop(revision, None)
        if flag == "model-path":
            # What it is called to its users does not change by that.
            changed.setdefault("served-model-name", name)
        notes.append(f"{name} is taken from {folder}: removing it there stops the service")
    return Found(changed, tuple(notes))


def required_files(flags: Mapping[str, FlagSetting]) -> list[tuple[str, Path, list[Path]]]:
    """Folders of models that flags name: in words, the folder, and the files in it that are read."""
    places = [(flag, flags.get(flag)) for flag in _FLAGS]
    folders = [
        (flag, Path(place)) for flag, place in places if isinstance(place, str) and place.startswith("/")
    ]
    return [
        (f"the folder of --{flag}", folder, _files(folder)) for flag, folder in folders if folder.is_dir()
    ]


def _snapshot(name: str, revision: str | None) -> Path | None:
    for cache in _caches():
        found = hub_cache.find_snapshot(name, revision, cache=cache)
        if found is not None and _whole(found.path):
            return found.path
    return None


def _caches() -> list[Path]:
    """One's own cache, and with sudo that of the person who typed it."""
    caches = [hub_cache.cache_dir()]
    if os.geteuid() == 0 and (person := os.environ.get("SUDO_USER")):
        with suppress(KeyError):
            caches.append(Path(pwd.getpwnam(person).pw_dir) / ".cache" / "huggingface" / "hub")
    return caches


def _whole(folder: Path) -> bool:
    """Every file of weights that its index names is there; a download that was cut short is not whole."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    try:
        named = json.loads(read_regular(index, most_bytes=_INDEX_LIMIT_BYTES))["weight_map"].values()
        return all((folder / str(name)).is_file() for name in set(named))
    except FileNotFoundError:
        weights = list(folder.glob("*.safetensors"))
        return bool(weights) and all(path.is_file() for path in weights)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".txt"))
    except OSError:
        return []

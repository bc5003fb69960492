"""Models by hub name: those that are on this machine already are served from there, and not fetched again."""

from __future__ import annotations

import json
import os
import pwd
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dflash_deploy.checkpoint import hub_cache
from dflash_deploy.deploy import access
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import read_regular
from dflash_deploy.profile.schema import FlagSetting

_INDEX_LIMIT_BYTES = 64 << 20
_MODELS = {"model-path": "revision", "speculative-draft-model-path": "speculative-draft-model-revision"}
_READ = (".json", ".safetensors", ".txt", ".model", ".py", ".jinja", ".tiktoken", ".bin", ".gguf")
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@dataclass(frozen=True)
class Found:
    """Flags with folders in the place of hub names, and what is to be told of that."""

    flags: dict[str, FlagSetting]
    notes: tuple[str, ...]


def local(flags: Mapping[str, FlagSetting], env: Mapping[str, str], who: access.Account | None) -> Found:
    """Put the folder of a whole snapshot where a hub name stands.

    The service then starts without the network, with the very files that were tuned with.

    Args:
        flags: the engine's, by full name.
        env: the service's own variables.
        who: the account that runs the service, None for the person who installs it.

    Raises:
        DeployError: the account may not read what is here, or the service could never fetch what is not.
    """
    changed, notes = dict(flags), []
    named = _named_cache(env)
    caches = [named] if named else _caches(who)
    for flag, revision in _MODELS.items():
        name, wanted = flags.get(flag), flags.get(revision)
        if not isinstance(name, str) or not hub_cache.is_hub_name(name):
            continue
        if Path(name).is_dir():
            # The service is started elsewhere.
            changed[flag] = str(Path(name).absolute())
            continue
        folder = _snapshot(name, wanted if isinstance(wanted, str) else None, caches)
        if folder is None:
            notes += _fetched(name, env, named, caches, confined=who is not None)
            continue
        if who is not None:
            _require(who, name, folder)
        changed[flag] = str(folder)
        changed.pop(revision, None)
        if flag == "model-path":
            # What it is called to its users does not change by that.
            changed.setdefault("served-model-name", name)
        notes.append(f"{name} is taken from {folder}: removing it there stops the service")
    return Found(changed, tuple(notes))


def require(flags: Mapping[str, FlagSetting], who: access.Account | None) -> None:
    """See that what flags name by its path is there, and that the account may read it.

    Raises:
        DeployError: a model's folder is not there, or the account may not read something.
    """
    for flag, value in flags.items():
        if not isinstance(value, str) or not value.startswith("/"):
            continue
        place = Path(value)
        if place.is_dir():
            if who is not None:
                access.require(who, f"the folder of --{flag}", place, files=_files(place))
        elif place.is_file():
            if who is not None:
                access.require(who, f"the file of --{flag}", place.parent, files=[place])
        elif flag in _MODELS:
            raise DeployError(
                f"--{flag} {value} is not there",
                fix="bring the model there, or name another folder in the profile (model.path, "
                "speculation.draft_path)",
                exit_code=ExitCode.MISSING,
            )


def _require(who: access.Account, name: str, folder: Path) -> None:
    # The files of a snapshot are links into a folder beside it.
    repository = folder.parents[1]
    if access.hidden(folder):
        raise DeployError(
            f"the model {name} is in {folder}, and a service has a /tmp and /var/tmp of its own",
            fix=f"fetch it elsewhere: HF_HOME=/opt/huggingface hf download {name}; then "
            "sudo HF_HOME=/opt/huggingface dflash-deploy service install",
            exit_code=ExitCode.UNAVAILABLE,
        )
    access.require(who, f"the model {name}", repository, files=[folder, *_files(folder)])


def _fetched(
    name: str, env: Mapping[str, str], named: Path | None, caches: list[Path], *, confined: bool
) -> list[str]:
    """What is to be told of a model that the service has to fetch itself.

    Raises:
        DeployError: it never could.
    """
    get = hub_cache.how_to_get(name)
    offline = next((variable for variable in _OFFLINE if env.get(variable, "").lower() in _TRUE), None)
    looked = " or ".join(map(str, caches))
    if offline is not None:
        raise DeployError(
            f"the model {name} is not whole in {looked}, and {offline} keeps the service from fetching it",
            fix=get,
            exit_code=ExitCode.MISSING,
        )
    if named is not None and confined:
        raise DeployError(
            f"the model {name} is not whole in {named}, which the profile's env names; a service may read "
            "there, and write in its own cache alone",
            fix=f"fetch it first: HF_HUB_CACHE={shlex.quote(str(named))} hf download {name}",
            exit_code=ExitCode.MISSING,
        )
    if "/" not in name:
        return []
    other = "" if named else "; another cache: HF_HOME=FOLDER dflash-deploy service install (sudo HF_HOME=…)"
    return [
        f"{name} is not whole in {looked}: the service fetches it when it starts, and has 30 minutes for "
        f"that and its start\n  to have it before: hf download {name}{other}"
    ]


_TRUE = ("1", "on", "yes", "true")


def _named_cache(env: Mapping[str, str]) -> Path | None:
    """The cache that the service's own variables name, as the hub's library reads them."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := env.get(variable):
            return Path(value)
    return Path(env["HF_HOME"]) / "hub" if env.get("HF_HOME") else None


def _caches(who: access.Account | None) -> list[Path]:
    """One's own cache, with sudo that of the person who typed it, and that of the service's account."""
    caches = [hub_cache.cache_dir()]
    people = [os.environ.get("SUDO_USER") if os.geteuid() == 0 else None, who.name if who else None]
    for person in filter(None, people):
        with suppress(KeyError):
            caches.append(Path(pwd.getpwnam(person).pw_dir) / ".cache" / "huggingface" / "hub")
    return list(dict.fromkeys(caches))


def _snapshot(name: str, revision: str | None, caches: list[Path]) -> Path | None:
    for cache in caches:
        found = hub_cache.find_snapshot(name, revision, cache=cache)
        if found is not None and _whole(found.path):
            return found.path
    return None


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
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix in _READ)
    except OSError:
        return []

"""What stands below a service (engine, driver, models, patches), and what of it has changed since."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_deploy.errors import DeployError
from dflash_deploy.files import read_regular
from dflash_deploy.serving_env.patches.integrity import verify_intact

_DRIVER = Path("/sys/module/nvidia/version")
_CONFIG_LIMIT_BYTES = 4 << 20
_MOST_FILES = 2000
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".json")
_COMMIT = re.compile(rb"[0-9a-f]{40}\s*")
_GONE = "gone"


@dataclass(frozen=True)
class Versions:
    """Each None where it could not be told, and ``gone`` where what was there is not any more.

    Attributes:
        engine: SGLang's version.
        driver: of NVIDIA.
        model: fingerprint of the target's folder, or the commit that the hub's cache holds.
        draft: the same of the draft.
        patches: names of the patches that are in place.
    """

    engine: str | None = None
    driver: str | None = None
    model: str | None = None
    draft: str | None = None
    patches: tuple[str, ...] | None = None


_WORDS = {"engine": "SGLang", "driver": "the NVIDIA driver", "model": "the model", "draft": "the draft model"}


def staleness(installed: Versions, now: Versions) -> tuple[str, ...]:
    """What has changed below a service since its generation was made, a sentence each.

    What was unknown then, or is now, has not changed as far as anybody can tell.
    """
    told = []
    for field, words in _WORDS.items():
        before, after = getattr(installed, field), getattr(now, field)
        if before in (None, _GONE) or after is None or before == after:
            continue
        if after == _GONE:
            told.append(f"{words} is not there any more: the next start will fail")
            continue
        fingerprint = field in ("model", "draft")
        told.append(f"{words} has changed" if fingerprint else f"{words} was {before} and is {after}")
    if installed.patches is not None and now.patches is not None:
        gone, added = set(installed.patches) - set(now.patches), set(now.patches) - set(installed.patches)
        told += [f"the patch {name} is gone, or not as it was applied" for name in sorted(gone)]
        told += [f"the patch {name} has been applied" for name in sorted(added)]
    return tuple(told)


def read_versions(
    python: Path, flags: Mapping[str, object], *, hub: Path | None, driver_file: Path = _DRIVER
) -> Versions:
    """Look at files alone: no driver is asked, no interpreter started.

    Args:
        python: the engine's interpreter.
        flags: the engine's flags, by full name.
        hub: ``HF_HOME`` of the service, where hub names are resolved.
        driver_file: where the kernel module tells its version.
    """
    try:
        driver = driver_file.read_text(encoding="ascii", errors="replace").strip() or None
    except OSError:
        driver = None
    verdict = verify_intact(python)
    return Versions(
        engine=verdict.version or (_GONE if _gone(python) else None),
        driver=driver,
        model=_fingerprint(flags.get("model-path"), hub),
        draft=_fingerprint(flags.get("speculative-draft-model-path"), hub),
        patches=verdict.applied if verdict.version else None,
    )


def _fingerprint(place: object, hub: Path | None) -> str | None:
    if not isinstance(place, str):
        return None
    try:
        folder = Path(place).expanduser()
        if folder.is_dir():
            return _folder_fingerprint(folder)
        if folder.is_absolute():
            return _GONE if _gone(folder) else None
        if hub is None or not re.fullmatch(r"[\w.-]+/[\w.-]+", place):
            return None
        ref = hub / "hub" / f"models--{place.replace('/', '--')}" / "refs" / "main"
        commit = read_regular(ref, most_bytes=100)
    except (OSError, RuntimeError, DeployError):
        return None
    return commit.strip().decode() if _COMMIT.fullmatch(commit) else None


def _gone(path: Path) -> bool:
    """It is certainly not there, which is another thing than not to be seen from here."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _folder_fingerprint(folder: Path) -> str:
    """Of its configuration's text, and its files' names and sizes: weights are too large to be read."""
    files = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS and path.is_file())
    listed = [(path.name, path.stat().st_size) for path in files[:_MOST_FILES]]
    digest = hashlib.sha256(json.dumps(listed).encode())
    config = folder / "config.json"
    if config.is_file():
        digest.update(read_regular(config, most_bytes=_CONFIG_LIMIT_BYTES))
    return digest.hexdigest()

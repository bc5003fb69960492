"""The serving environment: what its metadata says now, and what importing its packages came to.

Metadata takes a moment and is asked each time. Importing torch takes many seconds: that is done when asked
for, and remembered for as long as neither the packages nor the driver change.

```
<cache>/doctor/<key>.json
```
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash_deploy import paths
from dflash_deploy.files import write_atomic
from dflash_deploy.serving_env.describe import Description, Module, describe

_METADATA_S = 20.0
_SIZE_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True)
class Engine:
    """The environment that would serve.

    Attributes:
        about: its description; modules as far as they are known.
        imports: where ``about.modules`` is from: packages imported now, an earlier import that still holds,
            or the packages' names and versions alone.
        imported_at: when that was.
    """

    python: Path
    about: Description
    imports: Literal["now", "remembered", "metadata"]
    imported_at: str | None = None

    @property
    def source(self) -> str:
        """Where what is said of modules is from, in words."""
        words = {
            "now": "imported just now",
            "remembered": f"imported on {self.imported_at}; the same packages and driver since",
            "metadata": "names and versions of the packages, not imported",
        }
        return words[self.imports]


class _Remembered(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    schema_version: Literal[1] = 1
    imported_at: str = Field(max_length=100)
    modules: dict[str, Module] = Field(max_length=50)


def read_engine(python: Path, *, driver_version: str | None, deep: bool) -> Engine:
    """Ask an environment what it has.

    Args:
        python: its interpreter.
        driver_version: a new driver makes what was remembered void.
        deep: import its packages now.

    Raises:
        DeployError: it cannot be started, or does not answer.
    """
    about = describe(python, imports=deep, metadata_s=_METADATA_S)
    remembered_at = paths.cache_dir() / "doctor" / f"{_key(about, driver_version)}.json"
    if deep and about.modules is not None:
        record = _Remembered(
            imported_at=datetime.now(UTC).isoformat(timespec="seconds"), modules=about.modules
        )
        # What cannot be remembered is asked again.
        with suppress(OSError):
            write_atomic(remembered_at, record.model_dump_json())
        return Engine(python, about, "now", record.imported_at)
    record_then = _recall(remembered_at)
    if record_then is not None:
        about = about.model_copy(update={"modules": record_then.modules})
        return Engine(python, about, "remembered", record_then.imported_at)
    return Engine(python, about.model_copy(update={"modules": _told_by(about.packages)}), "metadata")


def _recall(path: Path) -> _Remembered | None:
    with suppress(OSError, ValidationError), path.open("rb") as file:
        return _Remembered.model_validate_json(file.read(_SIZE_LIMIT_BYTES))
    return None


def _key(about: Description, driver_version: str | None) -> str:
    """Names the state of an environment: another package, version, build, Python or driver is another key."""
    parts = [about.python.executable, about.python.version, driver_version or ""]
    parts += [f"{name}=={version}" for name, version in sorted(about.packages.items())]
    for folder in sorted(Path(about.python.prefix).glob("lib*/python*/*-packages")):
        # A package that is installed again in the same version changes its folder's entries.
        with suppress(OSError):
            parts.append(f"{folder}@{folder.stat().st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode(errors="replace")).hexdigest()[:32]


def _told_by(packages: Mapping[str, str]) -> dict[str, Module] | None:
    """What versions alone say of torch: the CUDA that it is built with, and its cuDNN."""
    version = packages.get("torch")
    if version is None:
        return None
    cuda = _cuda(packages, version.partition("+")[2])
    if cuda is None and not version.endswith("+cpu"):
        return None
    return {"torch": Module(installed=True, version=version, cuda=cuda, cudnn=_cudnn(packages))}


def _cuda(packages: Mapping[str, str], build: str) -> str | None:
    if build.startswith("cu") and build[2:].isdigit() and len(build) > 4:
        return f"{build[2:-1]}.{build[-1]}"
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"):
        if (found := packages.get(name)) is not None:
            return ".".join(found.split(".")[:2])
    return None


def _cudnn(packages: Mapping[str, str]) -> int | None:
    for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn"):
        parts = packages.get(name, "").split(".")[:3]
        if len(parts) == 3 and all(part.isascii() and part.isdigit() for part in parts):
            major, minor, patch = map(int, parts)
            return major * 10_000 + minor * 100 + patch
    return None

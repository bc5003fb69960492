"""Where an environment's SGLang lies, told from files alone: nothing of the environment is imported or run.

Standard library only, so that a gate before a service can use it in milliseconds.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import read_regular
from dflash_deploy.serving_env.refused import refused

_DIST_INFO = re.compile(r"sglang-(?P<version>[^/]+)\.dist-info", re.IGNORECASE)
_SITE_PACKAGES = (
    "lib/python3*/site-packages",
    "lib64/python3*/site-packages",
    "lib/python3*/dist-packages",
    "lib/python3/dist-packages",
    # Debian's pip, asked by the interpreter in /usr.
    "local/lib/python3*/dist-packages",
)
_COMMIT = re.compile(
    r"^(?:__commit_id__|commit_id)[^=\n]*(?:=[^=\n]*)?=\s*['\"]g?([0-9a-f]{7,40})['\"]", re.MULTILINE
)
_LOCAL_COMMIT = re.compile(r"\+(?:.*\.)?g([0-9a-f]{7,40})")
_MAX_BYTES = 64 << 20
_LONGEST_VERSION = 200


@dataclass(frozen=True)
class Tree:
    """An installed SGLang.

    Attributes:
        site_packages: the folder that the interpreter imports from; changes are recorded in it.
        root: the folder that holds ``sglang/``: the same one, or a checkout that is installed as editable.
        version: as its metadata says.
        commit: that it was built from, where it says.
        dist_info: the folder of its metadata.
        python: the interpreter of the environment, where it is known.
    """

    site_packages: Path
    root: Path
    version: str
    commit: str | None
    dist_info: Path
    python: Path | None

    @property
    def editable(self) -> bool:
        """The source is a checkout elsewhere; pip's list of files does not hold it."""
        return self.root != self.site_packages

    @property
    def quoted(self) -> str:
        """``site_packages`` as a shell wants it in a command, whatever letters are in it."""
        return shlex.quote(str(self.site_packages))

    @property
    def record(self) -> Path | None:
        """The list of installed files that pip keeps, or None where it does not list SGLang's own."""
        path = self.dist_info / "RECORD"
        return path if path.is_file() and not self.editable else None

    def missing_files(self) -> list[str]:
        """Files of SGLang that pip's list names and that are not there: the installation is incomplete."""
        record = self.record
        if record is None:
            return []
        with record.open(encoding="utf-8", errors="replace", newline="") as file:
            listed = [row[0] for row in csv.reader(file) if row]
        return [
            name
            for name in listed
            if name.startswith("sglang/") and not name.endswith(".pyc") and not (self.root / name).exists()
        ]


def find_tree(environment: Path) -> Tree:
    """The SGLang of a virtual environment, its interpreter, or a site-packages folder.

    Raises:
        DeployError: there is no such environment, no SGLang in it, or more than one; or it may not be read.
    """
    try:
        return _find_tree(environment)
    except OSError as error:
        raise refused(error, environment) from error


def _find_tree(environment: Path) -> Tree:
    # Path's own resolve() would leave the environment, and its expanduser() raises for nobody's ``~``.
    given = Path(os.path.abspath(os.path.expanduser(environment)))  # noqa: PTH100, PTH111 - see above
    try:
        given.stat()
    except PermissionError:
        raise
    except (OSError, ValueError) as error:
        # Also a name that is too long, a ring of links, or no name of a file at all.
        raise DeployError(
            f"{given}: no such environment",
            fix="give its name (dflash-deploy env list), its folder, its python or its site-packages",
            exit_code=ExitCode.MISSING,
        ) from error
    prefix = given
    if given.is_file():
        prefix = given.parent.parent
    folders = _site_packages(prefix) if given != _as_site_packages(given) else [given]
    found = [(folder, dist_info) for folder in folders for dist_info in _dist_infos(folder)]
    if not found:
        raise _no_sglang(given, folders)
    if len(found) > 1:
        listed = "\n".join(f"  {dist_info}" for _, dist_info in found)
        raise DeployError(
            f"{given} holds metadata of more than one SGLang, as an upgrade cut short leaves it:\n{listed}",
            fix="install SGLang again, so that one is left",
            exit_code=ExitCode.INVALID_INPUT,
        )
    site_packages, dist_info = found[0]
    root = site_packages if (site_packages / "sglang").is_dir() else _editable_root(site_packages, dist_info)
    if root is None:
        raise DeployError(
            f"{dist_info} says that SGLang is installed, but {site_packages / 'sglang'} is not there:"
            " the installation is incomplete",
            fix="install SGLang again, then check again",
            exit_code=ExitCode.MISSING,
        )
    version = _version(dist_info)
    return Tree(
        site_packages=site_packages,
        root=root,
        version=version,
        commit=_commit(version, root, dist_info),
        dist_info=dist_info,
        python=_python(site_packages, given if given.is_file() else None),
    )


def read_bytes(path: Path) -> bytes:
    """A file's content.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than any file here may be.
    """
    return read_regular(path, most_bytes=_MAX_BYTES)


def _as_site_packages(folder: Path) -> Path | None:
    """``folder`` when packages are installed right in it."""
    if not folder.is_dir() or (folder / "pyvenv.cfg").is_file():
        return None
    direct = (
        folder.name in {"site-packages", "dist-packages"} or (folder / "sglang" / "__init__.py").is_file()
    )
    return folder if direct or next(_dist_infos(folder), None) else None


def _site_packages(prefix: Path) -> list[Path]:
    folders: dict[Path, Path] = {}
    for pattern in _SITE_PACKAGES:
        for folder in sorted(prefix.glob(pattern)):
            # lib64 is often a link to lib.
            folders.setdefault(folder.resolve(), folder)
    return list(folders.values())


def _dist_infos(folder: Path) -> Iterator[Path]:
    try:
        entries = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if _DIST_INFO.fullmatch(entry.name) and (entry / "METADATA").is_file():
            yield entry


def _no_sglang(given: Path, folders: list[Path]) -> DeployError:
    for folder in folders:
        if (folder / "sglang").is_dir():
            return DeployError(
                f"{folder / 'sglang'} is there without pip's metadata of it: the installation is incomplete",
                fix="install SGLang again, then check again",
                exit_code=ExitCode.MISSING,
            )
    where = f" (looked in {', '.join(map(str, folders))})" if folders else ""
    return DeployError(
        f"{given} holds no SGLang{where}",
        fix="give --env the environment that serves: its folder, its python or its site-packages"
        + ("; or install SGLang there" if folders else ""),
        exit_code=ExitCode.MISSING,
    )


def _editable_root(site_packages: Path, dist_info: Path) -> Path | None:
    """The checkout of an editable installation, from pip's note of its origin or from a ``.pth`` file."""
    candidates: list[Path] = []
    try:
        origin: object = json.loads(read_bytes(dist_info / "direct_url.json"))
        if isinstance(origin, dict) and str(origin.get("url", "")).startswith("file://"):
            checkout = Path(unquote(urlsplit(str(origin["url"])).path))
            candidates += [checkout, checkout / "python", checkout / "src"]
    except (OSError, ValueError, RecursionError):
        pass
    for pth in sorted(site_packages.glob("*.pth")):
        try:
            lines = read_bytes(pth).decode(errors="replace").splitlines()
        except OSError:
            continue
        candidates += [
            site_packages / line.strip()
            for line in lines
            if line.strip() and not line.startswith(("#", "import"))
        ]
    return next((one for one in candidates if (one / "sglang" / "__init__.py").is_file()), None)


def _version(dist_info: Path) -> str:
    for line in read_bytes(dist_info / "METADATA").decode(errors="replace").splitlines():
        if line.lower().startswith("version:"):
            return line.partition(":")[2].strip()[:_LONGEST_VERSION]
        if not line.strip():
            break
    match = _DIST_INFO.fullmatch(dist_info.name)
    return match["version"][:_LONGEST_VERSION] if match else "unknown"


def _commit(version: str, root: Path, dist_info: Path) -> str | None:
    local = _LOCAL_COMMIT.search(version)
    if local:
        return local[1]
    try:
        origin: object = json.loads(read_bytes(dist_info / "direct_url.json"))
        vcs = origin.get("vcs_info") if isinstance(origin, dict) else None
        if isinstance(vcs, dict) and isinstance(vcs.get("commit_id"), str):
            return str(vcs["commit_id"])[:40]
    except (OSError, ValueError, RecursionError):
        pass
    try:
        found = _COMMIT.search(read_bytes(root / "sglang" / "_version.py").decode(errors="replace"))
    except OSError:
        return None
    return found[1] if found else None


def _python(site_packages: Path, given: Path | None) -> Path | None:
    if given is not None:
        return given
    above = site_packages.parents[:3]
    found = [folder / "bin" / "python" for folder in above]
    if site_packages.name == "dist-packages":
        # Debian's own interpreter has no other name, and stands in /usr for what lies in /usr/local.
        found += [folder / "bin" / "python3" for folder in site_packages.parents[2:4]]
    return next((path for path in found if path.is_file()), None)

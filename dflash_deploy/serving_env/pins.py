"""What an environment is made from: a pin, read from ``profiles/engines/<id>.yaml`` or given as a source."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from dflash_deploy import catalogue, paths, yaml_file
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.yaml_file import like

DEFAULT_PIN = "sglang-0.5.23"
KIND = "engines"
PACKAGE = "sglang"
PACKAGE_FOLDER = "python"
"""Where the package lies in SGLang's repository."""
GIVEN = "command-line"
"""Id of a pin that is none of a file."""

_VERSION = r"[0-9][0-9A-Za-z.!+_-]{0,80}"
_REQUIREMENT = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,80}}(\[[A-Za-z0-9,._-]{{1,80}}\])?=={_VERSION}")
_NAMED = re.compile(rf"{PACKAGE}-([0-9]+(?:\.[0-9]+)+(?:(?:a|b|rc|\.post|\.dev)[0-9]+)?)")
_WHEEL = re.compile(r"[\w.+!-]+\.whl(#sha256=[0-9a-f]{64})?")
_GIT = re.compile(r"(https|ssh|file)://[^\s@#]*(@[^\s@#/]+/[^\s@#]*)?")
_URL = re.compile(r"(https|http|file)://[!-~]+")

_Text = Annotated[str, Field(min_length=1, max_length=1000)]


class EnginePin(BaseModel):
    """One source of an engine; exactly one of ``version``, ``wheel``, ``git`` and ``path`` is given.

    Attributes:
        id: its file's name.
        python: the interpreter's version that the engine's wheels are built for, such as ``3.11``.
        version: of the release on PyPI.
        wheel: path or address of a wheel; ``#sha256=...`` behind it is checked.
        git: address of a repository, with ``commit``, the full one, and the ``subdirectory`` of the package.
        path: an environment that exists, to be used as it is and never written to.
        beside: packages to pin with it, ``name==version`` each.
        extra_index_urls: further package indexes.
        find_links: folders or pages of wheels.
        disk_mib: what the environment takes on disk.
        download_mib: what is downloaded for it, kept in the installer's cache.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str
    summary: str = Field(max_length=400)
    python: Annotated[str, like(r"3\.[0-9]{1,2}", "a version of Python such as 3.11")] = "3.11"
    version: Annotated[str, like(_VERSION, "a version such as 0.5.23")] | None = None
    wheel: _Text | None = None
    git: _Text | None = None
    commit: Annotated[str, like(r"[0-9a-f]{40}", "all 40 digits of a commit")] | None = None
    subdirectory: Annotated[str, like(r"[\w.-]+(/[\w.-]+)*", "a folder within the repository")] | None = None
    path: _Text | None = None
    beside: list[_Text] = Field(default=[], max_length=200)
    extra_index_urls: list[_Text] = Field(default=[], max_length=10)
    find_links: list[_Text] = Field(default=[], max_length=10)
    disk_mib: int = Field(default=11_300, ge=1)
    download_mib: int = Field(default=6_000, ge=0)
    sources: list[_Text] = []

    @field_validator("beside")
    @classmethod
    def _exact(cls, beside: list[str]) -> list[str]:
        for requirement in beside:
            if not _REQUIREMENT.fullmatch(requirement):
                raise ValueError(f"expected name==version, found {requirement[:80]!r}")
        return beside

    @field_validator("extra_index_urls")
    @classmethod
    def _addresses(cls, urls: list[str]) -> list[str]:
        for url in urls:
            _refuse_secret(url)
            if not _URL.fullmatch(url):
                raise ValueError(f"expected an address (https://...), found {url[:80]!r}")
        return urls

    @field_validator("find_links")
    @classmethod
    def _no_options(cls, links: list[str]) -> list[str]:
        for link in links:
            _refuse_secret(link)
            if link.startswith("-"):
                raise ValueError(f"expected a folder or an address, found {link[:80]!r}")
        return links

    @model_validator(mode="after")
    def _one_source(self) -> EnginePin:
        given = [name for name in ("version", "wheel", "git", "path") if getattr(self, name) is not None]
        if len(given) != 1:
            found = ", ".join(given) or "none of them"
            raise ValueError(f"give exactly one of version, wheel, git and path; found {found}")
        if (self.git is None) != (self.commit is None):
            raise ValueError("git and commit belong together: a branch or tag would be no pin")
        if self.subdirectory is not None and (self.git is None or ".." in self.subdirectory.split("/")):
            raise ValueError("subdirectory is a folder of the git repository")
        for address in (self.git, self.wheel):
            _refuse_secret(address or "")
        if self.git is not None and not _GIT.fullmatch(self.git):
            raise ValueError("git: expected https://, ssh:// or file:// and a repository, without @ref")
        if self.wheel is not None:
            place = self.wheel.rpartition("/")[2]
            if not _WHEEL.fullmatch(place) or ("://" in self.wheel and not _URL.fullmatch(self.wheel)):
                raise ValueError("wheel: expected the path or https:// address of a .whl file")
            if self.wheel.startswith("http://") and "#sha256=" not in place:
                raise ValueError("wheel: http:// can be tampered with: use https://, or add #sha256=...")
        return self

    @property
    def kind(self) -> Literal["version", "wheel", "git", "path"]:
        """Which of the four sources it is."""
        if self.version is not None:
            return "version"
        if self.wheel is not None:
            return "wheel"
        return "git" if self.git is not None else "path"

    @property
    def source(self) -> str:
        """The source in one line."""
        match self.kind:
            case "version":
                return f"{PACKAGE}=={self.version}"
            case "wheel":
                return str(self.wheel)
            case "git":
                return f"{self.git}@{self.commit}"
            case "path":
                return str(self.path)

    @property
    def local_wheel(self) -> Path | None:
        """The wheel's file, None where the source is none on this machine."""
        if self.wheel is None or "://" in self.wheel:
            return None
        return whole_path(self.wheel.partition("#")[0])

    def requirements(self) -> list[str]:
        """What an installer is asked for. A wheel's relative path is taken from the working folder."""
        match self.kind:
            case "git":
                place = f"#subdirectory={self.subdirectory}" if self.subdirectory else ""
                first = f"git+{self.git}@{self.commit}{place}"
            case "wheel":
                _, hash_, digest = str(self.wheel).partition("#")
                path = self.local_wheel
                first = f"{PACKAGE} @ {f'{path.as_uri()}{hash_}{digest}' if path else self.wheel}"
            case _:
                first = self.source
        return [first, *self.beside]


def whole_path(path: str | Path) -> Path:
    """An absolute path; ``~`` of nobody's stays as it is, and so names nothing."""
    return Path(os.path.expanduser(path)).absolute()  # noqa: PTH111 - Path's own raises for that


def _refuse_secret(address: str) -> None:
    """A pin is shown, kept with its environment and passed on: no place for a password.

    Raises:
        ValueError: there is one, or a query, which often holds one. It does not repeat the address.
    """
    parts = urlsplit(address)
    user, at, _ = parts.netloc.rpartition("@")
    if (at and (parts.scheme != "ssh" or ":" in user)) or ("://" in address and parts.query):
        raise ValueError(
            "a pin holds no password, token or query, since it is written down and shown: put them into "
            "~/.netrc, which uv, pip and git read"
        )


def load_pin(name_or_path: str) -> EnginePin:
    """A pin by id, or from a YAML file of one's own.

    Raises:
        DeployError: there is none, or its file is wrong.
    """
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        path = whole_path(name_or_path)
        document = yaml_file.read(path)
        pin = yaml_file.validate(document, EnginePin)
        if pin.id != path.stem:
            message = f"expected the file's own name, {path.stem!r}, found {yaml_file.describe(pin.id)}"
            raise yaml_file.InvalidDocument([document.problem(("id",), message)])
        return pin
    known = catalogue.files(KIND)
    if name_or_path not in known:
        raise DeployError(
            f"unknown engine pin {yaml_file.describe(name_or_path)}{yaml_file.nearest(name_or_path, known)}",
            fix=f"use one of: {', '.join(known)}; or describe it in {paths.config_dir() / KIND}/<id>.yaml; "
            "or give --version, --wheel, --git or --path",
            exit_code=ExitCode.MISSING,
        )
    return catalogue.load(KIND, name_or_path, EnginePin)


def pin_of_name(name: str | None) -> EnginePin:
    """What an environment is made from of which no more is known than its name.

    A name that begins with a release, such as ``sglang-0.5.22`` or ``sglang-0.5.22-patched``, is made from
    that one; an id is made from what it says; any other, and None, from the default.

    Raises:
        DeployError: the pin's file is wrong.
    """
    if name in catalogue.files(KIND):
        return load_pin(name)
    release = _NAMED.match(name or "")
    if release is None:
        return load_pin(DEFAULT_PIN)
    known = release[0]
    return load_pin(known) if known in catalogue.files(KIND) else pin_of_source("version", release[1])


_FORMS = {
    "version": "--version 0.5.23: a release as PyPI names it",
    "wheel": "--wheel FILE.whl, or an https:// address of one",
    "git": "--git https://github.com/sgl-project/sglang@COMMIT, all 40 digits of it",
    "path": "--path DIR: the folder that holds bin/python",
}


def pin_of_source(kind: str, source: str) -> EnginePin:
    """A pin from one source of a command line.

    Args:
        kind: ``version``, ``wheel``, ``git`` or ``path``.
        source: as the pin has it; of ``git`` with ``@`` and the commit.

    Raises:
        DeployError: it is no such source.
    """
    given: dict[str, yaml_file.YamlValue] = {"id": GIVEN, "summary": "given on the command line"}
    if kind == "git":
        address, _, commit = source.rpartition("@")
        given |= {"git": address, "commit": commit, "subdirectory": PACKAGE_FOLDER}
    elif kind == "path" or (kind == "wheel" and "://" not in source):
        given[kind] = str(whole_path(source))
    else:
        given[kind] = source
    try:
        return yaml_file.validate(yaml_file.Document(given, {(): yaml_file.Origin(f"--{kind}")}), EnginePin)
    except yaml_file.InvalidDocument as error:
        raise DeployError(error.message, fix=_FORMS[kind], exit_code=error.exit_code) from error

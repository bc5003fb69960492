"""What an interpreter's environment has, asked within it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash_deploy.engine.interpreter import ask
from dflash_deploy.errors import DeployError, ExitCode

_SCRIPT = Path(__file__).parents[1] / "inside" / "describe_env.py"
_MARK = b"DFLASH-DEPLOY-ENVIRONMENT "
_IMPORT_S = 90.0
_METADATA_S = 120.0

_Word = Annotated[str, Field(max_length=2000)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Python(_Part):
    """The interpreter; ``headers`` are those that just-in-time compiled code needs (``Python.h``)."""

    version: _Word
    implementation: _Word
    executable: _Word
    prefix: _Word
    headers: bool


class Engine(_Part):
    """The SGLang that is installed; ``commit`` where its metadata tells."""

    version: _Word
    commit: _Word | None = None
    source: _Word | None = None
    editable: bool = False
    location: _Word | None = None


class Program(_Part):
    """A compiler or build program.

    Attributes:
        path: where it is, or should be where a variable (``CUDA_HOME``, ``CC``, ``CXX``) says so.
        problem: why it does not run, None where it does.
        missing: headers that come with it and are not there.
    """

    path: _Word
    version: _Word | None = None
    problem: _Word | None = None
    missing: list[_Word] = Field(default=[], max_length=20)


class Module(_Part):
    """What came of importing a module.

    Attributes:
        error: why it could not be imported, None where it could.
        import_s: seconds that it took, the interpreter's start included.
        cuda: of torch's build, such as ``13.0``; None for a build without.
        arch_list: GPU architectures in torch's build, such as ``sm_120``.
        cudnn: its version as a number, such as 92301 for 9.23.1.
        capabilities: of the cards that torch sees.
    """

    installed: bool
    error: _Word | None = None
    version: _Word | None = None
    import_s: float | None = None
    cuda: _Word | None = None
    hip: _Word | None = None
    arch_list: list[_Word] | None = Field(default=None, max_length=200)
    cudnn: int | None = None
    cuda_available: bool | None = None
    capabilities: list[_Word] | None = Field(default=None, max_length=200)


class Description(_Part):
    """An environment as its own interpreter tells.

    Attributes:
        packages: version by normalised name of all that is installed.
        wanted: exact versions that its SGLang asks for, by normalised name.
        tools: ``nvcc``, ``ninja``, ``g++``, ``gcc``; None where it is not found.
        modules: what came of importing; None where that was not asked for.
    """

    python: Python
    glibc: _Word | None = None
    packages: dict[_Word, _Word] = Field(max_length=20_000)
    wanted: dict[_Word, _Word] = Field(default={}, max_length=20_000)
    sglang: Engine | None = None
    tools: dict[_Word, Program | None] = Field(max_length=50)
    modules: dict[_Word, Module] | None = Field(default=None, max_length=50)


def describe(
    python: Path, *, imports: bool = True, import_s: float = _IMPORT_S, metadata_s: float = _METADATA_S
) -> Description:
    """Ask an interpreter.

    Args:
        python: to be asked.
        imports: also import torch and what else runs on the card (some seconds each).
        import_s: longest wait for one of these.
        metadata_s: longest wait for all else.

    Raises:
        DeployError: it is not there, cannot be started, or does not answer.
    """
    arguments = ["--imports", str(import_s)] if imports else []
    timeout_s = metadata_s + (5 * import_s if imports else 0)
    try:
        answer = ask([python, _SCRIPT, *arguments], timeout_s=timeout_s)
    except OSError as error:
        raise DeployError(
            f"{python} cannot be started: {error.strerror}",
            fix="dflash-deploy env list; where the Python that it was made with is gone: dflash-deploy env "
            "create NAME --replace",
            exit_code=ExitCode.MISSING,
        ) from error
    if answer.status is None:
        raise DeployError(
            f"{python} did not say within {timeout_s:.0f} s what it has", fix=f"{python} {_SCRIPT}"
        )
    for line in reversed(answer.output.splitlines()):
        if line.startswith(_MARK):
            try:
                return Description.model_validate_json(line[len(_MARK) :])
            except ValidationError:
                break
    raise DeployError(f"{python} does not say what it has", fix=f"{python} {_SCRIPT}")

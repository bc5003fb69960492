"""The command that starts SGLang, and the flags that choose how draft tokens are made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dflash_deploy.errors import DeployError, ExitCode

if TYPE_CHECKING:
    from dflash_deploy.engine.launch import Flags
    from dflash_deploy.engine.sglang.flags import FlagTable

Method = Literal["none", "ngram", "mtp", "dspark", "dflash"]

_ALGORITHMS = {"ngram": "NGRAM", "mtp": "NEXTN", "dspark": "DSPARK", "dflash": "DFLASH"}
"""DFlash2 has no name of its own: it is DFLASH with a draft of the class ``DFlash2DraftModel``."""


def launch_argv(python: Path, flags: Flags, *, host: str, port: int, table: FlagTable) -> tuple[str, ...]:
    """The whole command, for the SGLang that ``table`` describes.

    The module is what every release has; the newest ones warn that ``sglang serve`` will take its place.

    Raises:
        DeployError: a flag that this SGLang does not have, or a value that it does not take.
    """
    spelled = table.spell({**flags, "host": host, "port": port})
    return (str(python), "-m", "sglang.launch_server", *spelled)


def speculation_flags(method: Method, draft_path: str | None = None) -> Flags:
    """Flags of a way to make draft tokens.

    Args:
        method: ``mtp`` drafts with the target's own extra layers and needs no draft model.
        draft_path: folder or hub name of the draft model; DFlash cannot do without, DSpark only where it
            comes within the target.

    Raises:
        DeployError: the method needs a draft model and none is given.
    """
    if method == "none":
        return {}
    if method == "dflash" and not draft_path:
        raise DeployError(
            "speculation.method is dflash, and no draft model is given",
            fix="set speculation.draft to a model card, or speculation.draft_path to a folder or hub name",
            exit_code=ExitCode.INVALID_INPUT,
        )
    flags: dict[str, str] = {"speculative-algorithm": _ALGORITHMS[method]}
    if draft_path and method in ("dflash", "dspark"):
        flags["speculative-draft-model-path"] = draft_path
    return flags

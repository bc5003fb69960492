"""What the checks of a patch's installed result share: the module under test, and how a finding is told.

Prints JSON after the mark. Standard library only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

MARK = "DFLASH-DEPLOY-CHECK "
_LONGEST = 500


def run(module_name: str, name: str, look: Callable[[ModuleType], tuple[str, str]]) -> None:
    """Try the module that this interpreter imports, if it is the file given as argument; print the finding.

    Args:
        module_name: of the module under test.
        name: that is taken from it.
        look: tries it: ``passed``, ``failed`` or ``not-run``, and why.
    """
    outcome, message = _found(sys.argv[1], module_name, name, look)
    sys.stdout.write(f"\n{MARK}{json.dumps({'outcome': outcome, 'message': message[:_LONGEST]})}\n")


def _found(
    path: str, module_name: str, name: str, look: Callable[[ModuleType], tuple[str, str]]
) -> tuple[str, str]:
    try:
        compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError) as error:
        return "failed", f"{path} does not compile here: {error}"
    try:
        module = __import__(module_name, fromlist=[name])
    except Exception as error:  # noqa: BLE001 - a machine without a GPU cannot import all of SGLang
        return "not-run", f"it compiles; {module_name} cannot be imported here: {_words(error)}"
    if not Path(module.__file__ or "").samefile(path):
        return "not-run", f"this interpreter imports another file: {module.__file__}"
    try:
        return look(module)
    except Exception as error:  # noqa: BLE001 - whatever the code under test raises is the finding
        return "failed", _words(error)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

"""Run by the interpreter that serves: print what its SGLang is and what options its own parser has, as JSON.

Standard library and sglang only. The one line that counts begins with the mark below; whatever else imports
print may stand around it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys

MARK = "DFLASH-DEPLOY-SGLANG "


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _literal(value: object) -> object:
    """Defaults that JSON can hold; the rest is nothing that a command line could say."""
    if isinstance(value, list | tuple):
        return [_literal(one) for one in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _option(action: argparse.Action) -> dict[str, object]:
    return {
        "names": list(action.option_strings),
        "action": type(action).__name__,
        "type": getattr(action.type, "__name__", None) if action.type is not None else None,
        "nargs": action.nargs,
        "choices": None if action.choices is None else [str(choice) for choice in action.choices],
        "default": _literal(action.default),
        "dest": action.dest,
        "instead": getattr(action, "new_flag", None),
        "refused": getattr(action, "error_message", None) is not None,
    }


def main() -> None:
    """Print the report."""
    report: dict[str, object] = {"version": _version("sglang"), "torch": _version("torch")}
    try:
        from sglang.srt.server_args import ServerArgs  # noqa: PLC0415 -- seconds of imports, and they may fail

        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        report["options"] = [_option(action) for action in parser._actions if action.option_strings]
    except Exception as error:  # noqa: BLE001 -- any failure of foreign imports is an answer
        report["error"] = f"{type(error).__name__}: {error}"[:1000]
    sys.stdout.write("\n" + MARK + json.dumps(report) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

"""The command line: parse, call, print. A command's module imports what it uses when the command runs."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated

import typer
from typer import Context
from typer.core import TyperGroup

from dflash_deploy import __version__
from dflash_deploy.errors import DeployError, ExitCode

SUMMARIES = {
    "doctor": "What is wrong here, and the command that fixes it.",
    "probe": "GPUs, driver and host, measured now.",
    "profile": "Service profiles: list, show, new, validate.",
    "env": "The SGLang environment: make, choose, back up.",
    "patch": "What an installed SGLang needs changed; undo it.",
    "checkpoint": "Make a checkpoint with a dense output head.",
    "plan": "The VRAM budget of a profile or pasted command.",
    "tune": "Find the best configuration by measuring.",
    "report": "A study as a page to look at: verdict, evidence.",
    "bench": "Measure any running server; compare results.",
    "compare": "Plain, MTP, DSpark, DFlash decoding side by side.",
    "emit": "Print what was tuned: unit, script, compose file.",
    "service": "Install, roll back and uninstall services.",
    "status": "Health, model, load and VRAM of what serves here.",
    "health": "One service checked in layers, for monitoring.",
    "diagnose": "From a log to the root cause and its fix.",
}
"""Every command in the order that a person meets them, as the overview shows them."""

_HELP = "Deploy and autotune SGLang with DFlash speculative decoding on consumer GPUs."


class _InOrder(TyperGroup):
    # The base names the context of typer's own copy of click, which is no public name.
    def list_commands(self, ctx: Context) -> list[str]:  # type: ignore[override]
        return sorted(super().list_commands(ctx), key=list(SUMMARIES).index)


def app_of(words: Sequence[str]) -> typer.Typer:
    """The command line as far as these words need it: one command where they name it, else all.

    To read the signatures of all takes longer than most commands do.
    """
    app = typer.Typer(
        cls=_InOrder,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(help=_HELP)(_options)
    for name in words[:1] if words and words[0] in SUMMARIES else SUMMARIES:
        module = import_module(f"{__name__}.{name}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name, short_help=SUMMARIES[name])
        else:
            settings = getattr(module, "SETTINGS", {})
            app.command(name, short_help=SUMMARIES[name], **settings)(getattr(module, name))
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dflash-deploy {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None: ...


def main() -> None:
    """Run the command line and exit with the status of ``errors.ExitCode``."""
    # What was imported stays to the end, where looking through all of it for garbage takes half a second.
    atexit.register(gc.freeze)
    if isinstance(sys.stdout, TextIOWrapper):
        # A terminal that cannot show a letter shows another; no command ends over it.
        sys.stdout.reconfigure(errors="replace")
    try:
        app_of(sys.argv[1:])()
    except DeployError as error:
        _complain(error.message, error.fix)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader of a pipe left (`| head`): nothing to say, and nowhere to say it.
        _leave_stdout()
        sys.exit(ExitCode.FAILED)
    except OSError as error:
        # A disk that filled up, a folder that may not be read: no fault of the tool's own.
        at = "the output" if error.filename is None else str(error.filename)
        _complain(
            f"{at}: {error.strerror or error}", "make room there, mend its permissions, or name another"
        )
        _leave_stdout()
        sys.exit(ExitCode.UNAVAILABLE)


def _complain(message: str, fix: str | None) -> None:
    from dflash_deploy.machine.text import printable

    # A message may quote a file, a log or a server that means no good to a terminal.
    lines = [f"error: {message}", *([f"  fix: {fix}"] if fix else [])]
    for line in "\n".join(lines).split("\n"):
        typer.echo(printable(line, longest=4096), err=True)


def _leave_stdout() -> None:
    """Nothing more goes to standard output; the interpreter would fail once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

"""The timer that checks a service again and again, and restarts it after evidence, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dflash_deploy.deploy import escape
from dflash_deploy.deploy.unit import template

UNIT = "dflash-sglang-health@"
"""What both units are called, before the service's name and their ending."""


def render_timer_units(
    command: Sequence[str],
    *,
    manager: Literal["system", "user"],
    every_s: int = 60,
    timeout_s: int = 30,
    options: Sequence[str] = (),
) -> dict[str, str]:
    """Both units by file name; each serves any number of services, by ``@NAME``.

    Args:
        command: how the tool is called: an absolute path, then its arguments.
        manager: whose units they are; a user's timer watches that user's services.
        every_s: pause between two checks.
        timeout_s: of one check.
        options: of ``dflash-deploy health``, beside those that the unit needs.
    """
    program, *arguments = command
    check = ["health", "@INSTANCE@", "--act", "--timeout", str(timeout_s), *options]
    line = escape.command_line(program, [*arguments, *check])
    # The specifier is systemd's to fill in, so it stands outside of what was escaped.
    values = {"command": line.replace("@INSTANCE@", "%i"), "every_s": every_s, "timeout_s": timeout_s}
    values["system"] = manager == "system"
    return {f"{UNIT}.{kind}": template(f"{UNIT}.{kind}.j2").render(values) for kind in ("service", "timer")}

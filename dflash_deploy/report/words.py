"""Figures in words, the same in every form of a report."""

from __future__ import annotations

import shlex

from dflash_deploy.profile.schema import FlagSetting


def percent(share: float) -> str:
    """``5.8%``."""
    return f"{share:.1%}"


def signed_percent(share: float) -> str:
    """``+5.8%``, with a true minus sign."""
    return f"{'-' if share < 0 else '+'}{percent(abs(share))}".replace("-", "\u2212")


def number(value: float, digits: int = 2) -> str:
    """With thousands apart: ``24,576`` or ``223.28``."""
    return f"{value:,.{digits}f}"


def gib(mib: float) -> str:
    """MiB as GiB: ``28.8``."""
    return f"{mib / 1024:.1f}"


def folded(command: str) -> str:
    """A quoted command over several lines, one flag each, as a shell takes it too."""
    lines = [""]
    for word in shlex.split(command):
        if word.startswith("--"):
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{shlex.quote(word)}"
    return " \\\n  ".join(lines)


def setting(value: FlagSetting | None) -> str:
    """A flag's value as a profile writes it; an em dash where the flag is not given."""
    if value is None:
        return "\u2014"
    if isinstance(value, list):
        return ",".join(str(item) for item in value)
    return "on" if value is True else "off" if value is False else str(value)

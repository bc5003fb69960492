"""Writing any text into a systemd unit so that the process gets it back byte for byte.

The rules are those of systemd.syntax(7), systemd.service(5) and systemd.unit(5): words are split and
C-unescaped, then ``%`` specifiers are expanded, and in a command ``$`` is expanded last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from dflash_deploy.errors import DeployError, ExitCode

_PLAIN = re.compile(r"[A-Za-z0-9_./:=,@+-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# systemd drops a line that holds one of Unicode's noncharacters.
_NONCHARACTER = re.compile(
    "[\ufdd0-\ufdef"
    + "".join(chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF))
    + "]"
)
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# The kernel refuses a longer argument or variable (MAX_ARG_STRLEN, its closing NUL counted).
_LONGEST_WORD_BYTES = 128 * 1024 - 1
_LONGEST_COMMENT = 1000


def command_word(argument: str) -> str:
    """One argument of ``Exec*=``, not its first word.

    Raises:
        DeployError: the argument holds a control character, is no valid Unicode, or is too long.
    """
    _require_text(argument, "an argument")
    return _quoted(argument.replace("%", "%%").replace("$", "$$"))


def executable(path: str) -> str:
    """The first word of ``Exec*=``: an absolute path.

    Raises:
        DeployError: systemd could not start this path whatever way it is written: it is not absolute, or
            holds a quote, a backslash, a dollar sign or a control character.
    """
    _require_text(path, "an executable's path")
    if not path.startswith("/") or path.endswith("/"):
        raise DeployError(
            f"systemd needs the full path of the program to start, not {path!r}",
            fix="give --python an absolute path",
            exit_code=ExitCode.INVALID_INPUT,
        )
    if bad := sorted(set(path) & set("\"'\\$")):
        raise DeployError(
            f"systemd cannot start a program whose path holds {' '.join(bad)}: {path}",
            fix="move the serving environment to a path without such characters",
            exit_code=ExitCode.INVALID_INPUT,
        )
    return _quoted(str(PurePosixPath("/", path.lstrip("/"))).replace("%", "%%"))


def environment_assignment(name: str, value: str) -> str:
    """One ``NAME=value`` of ``Environment=``. A dollar sign has no meaning there.

    Raises:
        DeployError: the name is no variable's name, or the value cannot stand in a unit.
    """
    if not _ENV_NAME.fullmatch(name):
        raise DeployError(f"{name!r} is not the name of a variable", exit_code=ExitCode.INVALID_INPUT)
    _require_text(value, f"the value of {name}")
    return _quoted(f"{name}={value}".replace("%", "%%"))


def setting_path(path: str) -> str:
    """An absolute path that ends a setting which is not split into words, such as ``LoadCredential=``.

    Raises:
        DeployError: the path is not absolute, holds a control character, or ends in a backslash or blank.
    """
    _require_text(path, "a path")
    if not path.startswith("/") or path.endswith(("\\", " ")):
        raise DeployError(
            f"this path cannot stand in a unit: {path!r}",
            fix="give an absolute path that ends in neither a blank nor a backslash",
            exit_code=ExitCode.INVALID_INPUT,
        )
    return path.replace("%", "%%")


def comment(text: str) -> str:
    """Text for a comment line: on one line of bounded length, whatever it holds, and never continued.

    What a terminal would act on instead of showing it (escape codes, direction marks) becomes ``?``.
    """
    one_line = " ".join(text[:_LONGEST_COMMENT].split())
    return "".join(letter if letter.isprintable() else "?" for letter in one_line).rstrip("\\ ")


def command_line(program: str, arguments: Iterable[str]) -> str:
    """A whole ``Exec*=`` value, an option with its values on a line of its own."""
    lines = [executable(program)]
    for argument in arguments:
        word = command_word(argument)
        # Most lines of a program that stands in the command have blanks.
        program_line = " " in argument and " " in lines[-1]
        if argument.startswith("--") or argument == "-m" or program_line or len(lines) == 1:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return " \\\n  ".join(lines)


def _quoted(text: str) -> str:
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _require_text(text: str, what: str) -> None:
    if bad := _CONTROL.search(text) or _NONCHARACTER.search(text):
        raise DeployError(
            f"{what} holds the character {bad[0]!r}, which a unit cannot carry: {text!r}",
            fix="take the character out (a file's name, a value in the profile)",
            exit_code=ExitCode.INVALID_INPUT,
        )
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise DeployError(
            f"{what} is not valid UTF-8, which a unit must be: {text!r}",
            fix="rename the file or folder in UTF-8",
            exit_code=ExitCode.INVALID_INPUT,
        ) from error
    if len(encoded) > _LONGEST_WORD_BYTES:
        raise DeployError(
            f"{what} is {len(encoded)} bytes long; the kernel takes at most {_LONGEST_WORD_BYTES}",
            exit_code=ExitCode.INVALID_INPUT,
        )

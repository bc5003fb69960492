"""The file that an API key is kept in: who may read it, and the key itself, which is never shown."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from dflash_deploy import yaml_file
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import read_regular

_LIMIT_BYTES = 1 << 16


def read_api_key(path: Path) -> str:
    """The key in a YAML file with the line ``api-key: …``, which is never shown.

    Raises:
        DeployError: it cannot be read, or holds no key.
    """
    try:
        content = yaml_file.parse(read_regular(path, most_bytes=_LIMIT_BYTES), str(path)).value
    except OSError as error:
        absent = isinstance(error, FileNotFoundError)
        raise DeployError(
            f"the API key file {path} cannot be read: {error.strerror}",
            fix="give --api-key-file FILE" if absent else "run the command as the user who may read it",
            exit_code=ExitCode.MISSING if absent else ExitCode.UNAVAILABLE,
        ) from error
    except yaml_file.InvalidDocument:
        # Its own words may quote the file.
        content = None
    key = content.get("api-key") if isinstance(content, dict) else None
    if not isinstance(key, str) or not key.isascii() or not key.isprintable() or not key:
        raise DeployError(
            f"{path} does not hold an API key",
            fix='write one line into it: `api-key: "..."` (printable ASCII)',
            exit_code=ExitCode.INVALID_INPUT,
        )
    return key


def require(path: Path) -> None:
    """See that a file holds a key, and keeps it from others.

    Raises:
        DeployError: it does not, with the command that mends it.
    """
    name = shlex.quote(str(path))
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        written = shlex.quote(f'umask 077; echo "api-key: k$(openssl rand -hex 24)" > {name}')
        raise DeployError(
            f"the API key file {path} is not there",
            fix=f"{'sudo ' if 'SUDO_USER' in os.environ else ''}sh -c {written}",
            exit_code=ExitCode.MISSING,
        ) from None
    except OSError as error:
        raise DeployError(
            f"the API key file {path} cannot be looked at: {error.strerror}",
            fix="run the command as the user who may read it",
            exit_code=ExitCode.UNAVAILABLE,
        ) from error
    if not stat.S_ISREG(mode):
        raise DeployError(
            f"the API key file {path} is no file ({stat.filemode(mode)})",
            fix="name a YAML file with the line `api-key: ...` in service.api_key_file",
            exit_code=ExitCode.INVALID_INPUT,
        )
    if mode & 0o077:
        raise DeployError(
            f"others may read the API key file {path} ({stat.filemode(mode)})",
            fix=f"chmod 600 {name}; and write a new key into it, for this one may be known",
            exit_code=ExitCode.UNAVAILABLE,
        )
    # What only root may read is root's to look into.
    if os.access(path, os.R_OK):
        read_api_key(path)

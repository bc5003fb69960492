"""Checks of access to checkpoints on the Hugging Face hub. Nothing is asked over the network."""

from __future__ import annotations

import os
import shlex
import stat
from functools import partial
from pathlib import Path

from dflash_deploy.checkpoint import hub_cache
from dflash_deploy.doctor.finding import Answer, Repair, failed, passed, warned
from dflash_deploy.doctor.subject import Subject
from dflash_deploy.paths import expanded

_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE = frozenset({"1", "true", "yes", "on"})
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_MAX_TOKEN_BYTES = 4096


def offline(subject: Subject) -> Answer:
    """Offline mode is off, or nothing has to be downloaded."""
    environ = {**os.environ, **(subject.profile.env if subject.profile else {})}
    on = [name for name in _OFFLINE if environ.get(name, "").lower() in _TRUE]
    if not on:
        return passed("off; the hub may be asked")
    setting = ", ".join(f"{name}={environ[name]}" for name in on)
    missing = [
        model.place
        for model in (subject.target(), subject.draft())
        if model is not None and model.checkpoint is None and not (model.is_folder or model.is_nowhere)
    ]
    if missing:
        return failed(
            f"offline ({setting}), and not on this machine: {', '.join(missing)}",
            "; ".join(f"HF_HUB_OFFLINE=0 hf download {place}" for place in missing),
        )
    return passed(f"on ({setting})")


def token(_: Subject) -> Answer:
    """A token for gated checkpoints has the form of one, and nobody else can read it."""
    for name in _TOKENS:
        if given := os.environ.get(name):
            if not _is_token(given):
                return warned(
                    f"{name} is set and is no token: it should be one word that begins with hf_",
                    f"unset {name}; hf auth login",
                )
            return passed(f"from {name} (not shown)")
    file = expanded(os.environ.get("HF_TOKEN_PATH") or str(hub_cache.hugging_face_dir() / "token"))
    try:
        with file.open("rb") as opened:
            about = os.fstat(opened.fileno())
            text = opened.read(_MAX_TOKEN_BYTES).decode("ascii", "replace")
    except FileNotFoundError:
        return passed("none; open checkpoints need none (for gated ones: hf auth login)")
    except OSError as error:
        return warned(f"{file} cannot be read: {error.strerror}", f"ls -l {file}")
    if not _is_token(text.strip()):
        return warned(f"{file} holds no token: it should be one word that begins with hf_", "hf auth login")
    mode = stat.S_IMODE(about.st_mode)
    if mode & 0o077:
        shut = f"chmod 600 {shlex.quote(str(file))}"
        if os.geteuid() not in (0, about.st_uid):
            return warned(
                f"{file} can be read by others (mode {mode:o}), and is another user's",
                f"have its owner run: {shut}; a token of your own: hf auth login",
            )
        return warned(
            f"{file} can be read by others (mode {mode:o})", shut, repair=Repair(shut, partial(_shut, file))
        )
    return passed(f"from {file} (not shown)")


def _shut(file: Path) -> str:
    file.chmod(0o600)
    return f"{file} is its owner's alone now"


def _is_token(text: str) -> bool:
    return text.startswith("hf_") and text.isascii() and text.isprintable() and " " not in text

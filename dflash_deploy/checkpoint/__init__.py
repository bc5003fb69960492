"""Facts of targets and drafts, from their own files and from shipped cards."""

from __future__ import annotations

from dflash_deploy.checkpoint.facts import Checkpoint
from dflash_deploy.checkpoint.match import mismatches
from dflash_deploy.checkpoint.reading import read_checkpoint
from dflash_deploy.checkpoint.summary import Row, describe

__all__ = ["Checkpoint", "Row", "describe", "mismatches", "read_checkpoint"]

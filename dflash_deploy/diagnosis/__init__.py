"""From a log to its root cause and the change that helps: a catalogue of failures, and what reads it."""

from dflash_deploy.diagnosis.read import diagnose
from dflash_deploy.diagnosis.verdict import Diagnosis, Finding

__all__ = ["Diagnosis", "Finding", "diagnose"]

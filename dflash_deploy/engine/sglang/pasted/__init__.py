"""Commands that people paste: shell scripts, unit files, compose files, logs. Read, never run."""

"""Checks before anything is launched: what is wrong on this machine, and the command that mends it."""

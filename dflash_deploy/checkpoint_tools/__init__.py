"""Checkpoints made from checkpoints."""

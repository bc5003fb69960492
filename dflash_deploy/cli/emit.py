from __future__ import annotations


def emit() -> None:
    raise NotImplementedError

from __future__ import annotations


def tune() -> None:
    raise NotImplementedError

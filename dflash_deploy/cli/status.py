from __future__ import annotations


def status() -> None:
    raise NotImplementedError

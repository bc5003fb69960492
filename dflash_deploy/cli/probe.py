from __future__ import annotations


def probe() -> None:
    raise NotImplementedError

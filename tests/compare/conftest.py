from tests.tune.conftest import tool

__all__ = ["tool"]

"""The benchmark program on published boots, as a module for tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "plan_accuracy.py"


def accuracy() -> ModuleType:
    """``benchmarks/plan_accuracy.py``."""
    name = "plan_accuracy"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, PROGRAM)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]

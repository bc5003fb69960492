from __future__ import annotations

from tests.simulator.conftest import launch  # noqa: F401 - a fixture

"""What the plan promises, kept on every published boot that tells enough."""

from __future__ import annotations

import json

import pytest

from .published import accuracy

DATA = json.loads(accuracy().DATA.read_text())
FOUND = list(accuracy().comparisons(DATA))


def of_kind(*kinds: str) -> list:
    return [one for one in FOUND if one.kind in kinds]


@pytest.mark.parametrize("one", of_kind("bytes", "count", "slots"), ids=lambda one: f"{one.row}: {one.what}")
def test_what_the_engine_computes_is_exact(one):
    assert one.ok, (one.predicted, one.observed)


@pytest.mark.parametrize("one", of_kind("pool"), ids=lambda one: f"{one.row}: {one.what}")
def test_pools_are_as_logged(one):
    assert one.predicted == pytest.approx(one.observed, abs=accuracy().LOGGED_GIB)


def test_tokens():
    figures = accuracy().summary(FOUND)
    assert figures["kv_rows"] >= 9
    assert figures["kv_median_error"] <= 0.002
    assert figures["kv_worst_error"] <= 0.03
    assert figures["split_worst_error"] <= 0.03


@pytest.mark.parametrize("one", of_kind("peak"), ids=lambda one: f"{one.row}: {one.what}")
def test_memory_is_within_half_a_gib(one):
    assert one.predicted == pytest.approx(one.observed, abs=0.5)


@pytest.mark.parametrize("one", [one for one in of_kind("stage") if one.counted], ids=lambda one: one.row)
def test_failures_are_predicted_where_they_happened(one):
    assert one.ok, (one.predicted, one.observed)


def test_no_row_is_dropped_in_silence():
    """Every published row is compared or left out with its reason."""
    compared = {one.row for one in FOUND}
    for row in [*DATA["boots"], *DATA["splits"], *DATA["rests"]]:
        assert row["id"] in compared
    for one in FOUND:
        assert one.counted or len(one.note) > 40, one.row
    assert all(row["what"] and row["why"] for row in DATA["unusable"])

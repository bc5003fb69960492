from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.engine.sglang.versions import (
    NEWEST,
    RELEASES,
    facts,
    nearest,
    order,
    state_slots_per_request,
)


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_stands_for_itself(release: str) -> None:
    assert nearest(release).release == release
    assert nearest(f"v{release}").note is None
    assert facts(release).release == release


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.5.6.post3.dev9094+gc14312a66", "0.5.19"),  # main branch, counted from an old tag
        ("0.0.0.dev1+g5f55db35e", "0.5.19"),
        ("0.5.17.dev20260819+g574274660f", "0.5.18"),
        ("0.5.17.dev20260819", "0.5.17"),
        ("0.5.22rc1", "0.5.22"),
        ("0.5.19.post2", "0.5.19"),
        ("0.5.16.post1", "0.5.16"),
        ("0.5.12", "0.5.14"),
        ("0.5.24", NEWEST),
        ("0.6.0.dev3", NEWEST),
        ("1.0", NEWEST),
        ("nightly-dev-cu13", NEWEST),
        ("", NEWEST),
    ],
)
def test_other_versions_get_the_nearest_release_and_a_note(version: str, release: str) -> None:
    found = nearest(version)
    assert found.release == release
    assert found.note is not None


@given(st.text(max_size=60))
def test_any_text_gets_facts(version: str) -> None:
    assert facts(version).release in RELEASES


def test_releases_are_ordered() -> None:
    assert sorted(RELEASES, key=order) == list(RELEASES)
    assert order("0.5.22rc1") < order("0.5.22") < order("0.5.22.post1")


def test_dflash2_came_with_0_5_19() -> None:
    assert [release for release in RELEASES if not facts(release).dflash2][-1] == "0.5.18"
    assert not facts("0.5.15.post1").dspark
    assert facts("0.5.16").dspark


@pytest.mark.parametrize(
    ("version", "memory_mib", "chunk", "decode_bs"),
    [
        ("0.5.19", 32607, 2048, 24),
        ("0.5.20", 32607, 4096, 48),
        ("0.5.19", 24564, 2048, 24),
        ("0.5.23", 16376, 2048, 8),
        ("0.5.23", 49140, 4096, 32),
        ("0.5.23", 97887, 8192, 256),
        ("0.5.23", 288000, 16384, 512),
    ],
)
def test_defaults_by_card(version: str, memory_mib: float, chunk: int, decode_bs: int) -> None:
    defaults = facts(version).defaults_for(memory_mib)
    assert (defaults.chunk_tokens, defaults.decode_bs) == (chunk, decode_bs)


@pytest.mark.parametrize(
    ("strategy", "radix_cache", "overlap", "slots"),
    [
        ("extra_buffer", False, True, 1),
        ("no_buffer", True, False, 3),
        ("extra_buffer_lazy", True, True, 4),
        ("extra_buffer", True, False, 4),
        ("extra_buffer", True, True, 5),
        ("auto", True, True, 5),
        ("auto", True, False, 3),
    ],
)
def test_state_slots_of_a_request(strategy: str, radix_cache: bool, overlap: bool, slots: int) -> None:
    assert state_slots_per_request(strategy, radix_cache=radix_cache, overlap=overlap) == slots

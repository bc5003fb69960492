"""Nothing that a driver or a process can say makes these fail."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.machine.clocks import clock_reasons
from dflash_deploy.machine.text import printable
from dflash_deploy.machine.visible import visible_indices

UUIDS = ["GPU-11111111-1111-1111-1111-111111111111", "GPU-22222222-2222-2222-2222-222222222222", None]
ENTRIES = st.sampled_from([*UUIDS[:2], "GPU-1", f"MIG-{UUIDS[1]}/3/0", "0", " 1", "2x", "-1", "+1", "", "٣"])


@given(st.integers())
def test_every_mask_is_decoded(mask: int):
    reasons = clock_reasons(mask)
    assert len(reasons) == (mask & (2**64 - 1)).bit_count()
    assert len(set(reasons)) == len(reasons)


def test_reasons_in_words():
    assert clock_reasons(0) == ()
    assert clock_reasons(0x44) == ("software power cap", "hardware thermal slowdown")
    assert clock_reasons(0x800) == ("unknown reason 0x800",)


@given(st.text(st.characters()))
def test_printable_is_printable_and_short(text: str):
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) <= 64
    shown.encode()


@given(st.text(st.characters(categories=["L", "N", "P"]), max_size=64))
def test_printable_leaves_plain_text_alone(text: str):
    assert printable(text) == text


@given(
    st.one_of(st.text(), st.lists(ENTRIES).map(",".join)), st.sampled_from(["", "PCI_BUS_ID"]), st.booleans()
)
def test_visible_cards_are_cards(setting: str, order: str, alike: bool):
    names = ["A", "A" if alike else "B", "A"]
    visible = visible_indices(UUIDS, names, {"CUDA_VISIBLE_DEVICES": setting, "CUDA_DEVICE_ORDER": order})
    if visible is None:
        assert not alike
        assert not order
    else:
        assert set(visible) <= {0, 1, 2}
        assert len(set(visible)) == len(visible)


def test_mig_instance_of_a_card():
    environ = {"CUDA_VISIBLE_DEVICES": f"MIG-{UUIDS[1]}/3/0"}
    assert visible_indices(UUIDS, ["A"] * 3, environ) == (1,)

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.bench.quality.agreement import Said, agree, first_divergence

IDS = st.lists(st.integers(0, 9), max_size=20).map(tuple)


@given(IDS, IDS)
def test_tokens_are_counted_where_they_are_known(ours, theirs):
    found = first_divergence(Said("x", ours), Said("y", theirs))
    assert (found is None) == (ours == theirs)
    if found is not None:
        at = int(found)
        assert ours[:at] == theirs[:at]
        assert ours[at : at + 1] != theirs[at : at + 1]


@given(st.text(), st.text())
def test_without_token_ids_characters_say_where_texts_part(one, other):
    found = first_divergence(Said(one, tokens=7), Said(other, tokens=7))
    assert (found is None) == (one == other)


def test_characters_are_turned_into_tokens_by_the_answers_own_length():
    found = first_divergence(Said("a" * 100, tokens=20), Said("a" * 50 + "b" * 50, tokens=20))
    assert found == pytest.approx(10)


def test_late_parting_is_reported_and_no_fault():
    plain = [Said(f"{n} " + "one two three " * 20, tuple(range(80))) for n in range(6)]
    ours = [
        *plain[:3],
        *(Said(one.text[:100] + "other", (*one.token_ids[:40], 999, 998)) for one in plain[3:]),
    ]
    found = agree(ours, plain)
    assert (found.prompts, found.identical, found.diverge_after) == (6, 3, 40)
    assert found.counted
    assert found.fault is None
    assert "other" in found.example


def test_parting_at_once_again_and_again_is_a_fault():
    plain = [Said(f"{n} good", (1, 2, 3)) for n in range(6)]
    found = agree([Said(f"z{n} bad", (9, 2, 3)) for n in range(6)], plain)
    assert found.diverge_after == 0
    assert "part from plain decoding at once" in found.fault
    assert agree([Said("z bad", (9,))], plain[:1]).fault is None


def test_the_same_answers_agree():
    said = [Said("same", (1, 2)), Said("", ())]
    found = agree(said, said)
    assert (found.identical, found.diverge_after, found.example, found.fault) == (2, None, None, None)
    assert said[0].digest == Said("same").digest != said[1].digest

"""The search space: nothing lost, nothing that cannot serve, the sure ones first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.errors import DeployError
from dflash_deploy.plan.candidates import Margins, search_space
from dflash_deploy.plan.vram import Planner, plan, plan_budget

from .test_vram import BF16_STATE, DFLASH, DFLASH2, FP8, RTX_5090_MIB, TARGET
from .test_vram import FOUR_USERS as FOUR
from .test_vram import ONE_USER as ONE

CHOICES = {
    "mem-fraction-static": [0.80, 0.85, 0.90, 0.95],
    "max-total-tokens": [None, 8192, 16384],
    "speculative-num-draft-tokens": [4, 8],
    "disable-radix-cache": [False, True],
}


def asked(flags: dict, users: int = 1):
    from dflash_deploy.plan.vram import Question

    return Question(RTX_5090_MIB, TARGET, DFLASH2, flags, "0.5.23", users)


def test_every_combination_is_kept_or_counted():
    found = search_space(asked(ONE), CHOICES, context_tokens=8192)
    assert found.size == found.examined == 48
    assert len(found.candidates) + sum(found.dropped.values()) == 48
    assert 0 < len(found.candidates) < 48


def test_what_is_kept_serves_what_is_asked():
    found = search_space(asked(FOUR, 4), CHOICES, context_tokens=2048)
    assert found.candidates
    for candidate in found.candidates:
        budget = plan_budget(
            card_memory_mib=RTX_5090_MIB,
            target=TARGET,
            draft=DFLASH2,
            flags=candidate.flags,
            version="0.5.23",
            users=4,
        )
        assert budget == candidate.budget
        assert budget.max_running_requests >= 4
        assert budget.context_per_user >= 2048
        assert not budget.certain


@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "mem-fraction-static": st.sampled_from([0.7, 0.85, 0.9, 0.95, "0.9", "nan", True]),
                "max-mamba-cache-size": st.sampled_from([1, 4, True, "4", "8k"]),
                "max-total-tokens": st.sampled_from([8192, 1, True]),
                "attention-backend": st.sampled_from(["aiter", "flashinfer"]),
                "disable-radix-cache": st.sampled_from([True, False, 1]),
            },
        ),
        max_size=8,
    )
)
def test_what_is_remembered_changes_no_plan(listed):
    planner = Planner(asked({}))
    for flags in listed:
        assert _answer(planner.plan, ONE | flags) == _answer(_fresh, ONE | flags)


def _fresh(flags):
    return plan(asked(flags))


def _answer(planned, flags):
    try:
        return planned(flags)
    except DeployError as error:
        return error.message


def test_the_first_fits_with_its_margins():
    margins = Margins(desktop=300.0, long_requests=256.0)
    found = search_space(asked(ONE), CHOICES, context_tokens=8192, margins=margins)
    assert found.candidates[0].budget.headroom_mib >= 556
    spare = [candidate.budget.headroom_mib >= 556 for candidate in found.candidates]
    assert spare == sorted(spare, reverse=True)


def test_margins_drop_more():
    loose = search_space(asked(FOUR, 4), CHOICES, context_tokens=2048)
    tight = search_space(
        asked(FOUR, 4), CHOICES, context_tokens=2048, margins=Margins(desktop=1500.0, doubt=0.0)
    )
    assert len(tight.candidates) < len(loose.candidates)


def test_a_large_space_is_sampled_over_all_values():
    found = search_space(asked(ONE), CHOICES, context_tokens=1, most=10)
    assert found.size == 48
    assert 1 <= found.examined <= 10
    seen = search_space(
        asked({**DFLASH, **BF16_STATE, **FP8, "disable-radix-cache": True, "max-running-requests": 1}),
        {"mem-fraction-static": [0.86 + step / 1000 for step in range(40)], "page-size": [1, 16]},
        context_tokens=1,
        most=20,
    )
    assert {candidate.flags["page-size"] for candidate in seen.candidates} == {1, 16}


def test_values_that_nobody_can_read_are_dropped_with_their_reason():
    found = search_space(asked(ONE), {"kv-cache-dtype": ["fp8_e4m3", "int3"]}, context_tokens=1)
    assert found.dropped == {"the plan does not know the number type int3": 1}

import pytest

from dflash_deploy.bench.measurement import Spread
from dflash_deploy.profile.schema import Limit
from dflash_deploy.tune.limits import describe, figures, limits_of, objective_value, unchecked, violations

from .samples import boot, measurement, profile


def test_a_limit_holds_for_the_worst_user_and_round():
    found = figures(measurement((100.0, 80.0, 120.0)), boot(), 2)
    assert found["total_tokens_per_s"] == 80
    assert found["user_tokens_per_s"] == 40
    assert found["latency_s"] == 2.5


def test_context_is_the_pool_shared_by_all_users_within_the_models_own():
    assert figures(measurement(), boot(kv_tokens=9001, context_tokens=8000), 2)["context_tokens"] == 4500
    assert figures(measurement(), boot(kv_tokens=90_000, context_tokens=8000), 2)["context_tokens"] == 8000
    assert figures(measurement(), boot(), 2)["context_tokens"] is None


def test_the_promised_context_is_a_limit_without_being_said():
    limits = limits_of(profile())
    assert violations({"context_tokens": 750.0}, limits) == {"context_tokens": 0.25}
    own = limits_of(
        profile(objective={"optimize": "latency_s", "constraints": {"context_tokens": {"min": 500.0}}})
    )
    assert not violations({"context_tokens": 750.0}, own)


@pytest.mark.parametrize(
    ("value", "limit", "share"),
    [
        (90.0, Limit(min=100.0), 0.1),
        (1.5, Limit(max=1.0), 0.5),
        (100.0, Limit(min=100.0, max=100.0), None),
        (-5.0, Limit(min=0.0), 5.0),
    ],
)
def test_how_far_a_limit_is_broken(value, limit, share):
    broken = violations({"latency_s": value}, {"latency_s": limit})
    assert broken == ({} if share is None else {"latency_s": pytest.approx(share)})


def test_what_cannot_be_told_breaks_nothing_and_is_named():
    limits = {"free_vram_mib": Limit(min=768.0)}
    found = figures(measurement(), boot(), 2)
    assert not violations(found, limits)
    assert unchecked(found, limits) == ("free_vram_mib",)
    known = figures(measurement(vram_used_mib=31900, vram_total_mib=32607), boot(), 2)
    assert violations(known, limits)
    assert not unchecked(known, limits)


def test_a_broken_limit_is_told_with_its_figure():
    limits = {"ttft_p95_s": Limit(max=1.0), "user_tokens_per_s": Limit(min=100.0)}
    found = {"ttft_p95_s": 1.25, "user_tokens_per_s": 120.0}
    text = describe(violations(found, limits), found, limits)
    assert text == "ttft_p95_s 1.25, wanted at most 1"


def test_the_objective_is_the_median():
    measured = measurement((100.0, 80.0, 120.0), latency_s=Spread(3.0, 1.0, 9.0))
    assert objective_value("total_tokens_per_s", measured, boot(), 2) == 100
    assert objective_value("user_tokens_per_s", measured, boot(), 2) == 50
    assert objective_value("latency_s", measured, boot(), 2) == 3
    assert objective_value("context_tokens", measured, boot(kv_tokens=5000), 2) == 2500

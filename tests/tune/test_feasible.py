import pytest

from dflash_deploy.engine.sglang.bootlog import read_boot_log
from dflash_deploy.engine.sglang.flags import FlagTable
from dflash_deploy.machine.cards import load_card
from dflash_deploy.plan.terms import Terms
from dflash_deploy.profile.load import load_profile
from dflash_deploy.simulator.virtual import Ask, run_virtual
from dflash_deploy.tune.feasible import Forecaster
from dflash_deploy.tune.launching import model_flags, shared_flags, values
from dflash_deploy.tune.records import Proof
from dflash_deploy.tune.space import space_of

from .samples import boot, measurement, trial


def forecast(name, memory_mib=32607, **changes):
    profile = load_profile(name)
    flags = {**model_flags(profile, simulated=True), **profile.flags, **profile.known[0].flags}
    return Forecaster(profile, "0.5.23", memory_mib).forecast(flags | changes)


@pytest.mark.parametrize("name", ["rtx5090-single-user", "rtx5090-four-users"])
def test_a_setting_that_people_run_is_let_pass_with_its_figures(name):
    found = forecast(name)
    assert found.refusal is None
    assert found.predicted.fits
    assert found.predicted.peak_mib == pytest.approx(30_000, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"max-running-requests": 3}, "below the 4 users"),
        ({"disable-radix-cache": False}, "serves 1 at once, 4 are wanted"),
        ({"mem-fraction-static": 0.5}, "ends at sizing"),
        ({"max-total-tokens": 4096}, "each user has 1024 tokens, 2048 are promised"),
        (
            {"max-mamba-cache-size": 24, "max-total-tokens": 24576, "mem-fraction-static": 0.99},
            "plan",
        ),
    ],
)
def test_what_cannot_serve_is_refused_with_its_reason(changes, why):
    assert why in forecast("rtx5090-four-users", **changes).refusal


def test_nothing_is_said_of_a_card_or_model_that_is_not_known():
    assert forecast("rtx5090-four-users", memory_mib=None).predicted is None
    profile = load_profile("rtx5090-single-user", overrides=["model.target=/models/own"])
    found = Forecaster(profile, "0.5.23", 32607).forecast({"mem-fraction-static": 0.5})
    assert found.refusal is None
    assert found.predicted is None


def start(profile, fraction):
    """A trial on a simulated card whose hidden deviations are those of one seed."""
    flags = {
        **model_flags(profile, simulated=True),
        **profile.flags,
        **profile.known[0].flags,
        "mem-fraction-static": fraction,
    }
    run = run_virtual(FlagTable.for_version("0.5.23").spell(values(flags)), [[Ask()]], seed=13)
    boot = read_boot_log(line for text in run.log for line in text.splitlines())
    measured = measurement(vram_used_mib=run.vram_used_mib, vram_total_mib=32607)
    return trial(1, (100.0,), flags=flags, boot=boot, measured=measured)


def test_a_log_teaches_only_where_the_plan_can_follow_the_start():
    profile = load_profile("rtx5090-four-users")
    forecaster = Forecaster(profile, "0.5.23", 32607)
    roomy, tight = start(profile, 0.95), start(profile, 0.8768)
    assert roomy.boot.kv_tokens == 8192
    assert 0 < tight.boot.kv_tokens < 600
    learnt = forecaster.lesson(roomy)
    assert learnt.learnt
    after = forecaster.corrected(learnt.terms)
    assert after.forecast(roomy.flags).predicted.peak_mib == pytest.approx(
        roomy.measured.vram_used_mib, abs=50
    )
    # By the plan this one ends at the sizing, and that is no peak to hold a running server's against.
    assert after.lesson(tight) is None


def test_what_cannot_be_planned_for_can_be_launched():
    assert forecast("rtx5090-single-user", **{"tp-size": 2}).refusal is None


METHODS = "search.method={choices: [dflash, dspark, mtp, none]}"


def planned(forecaster, **changes):
    known = {**forecaster.profile.known[0].flags, **changes}
    space = space_of(forecaster.profile)
    return {**shared_flags(forecaster.profile, simulated=True), **space.whole(known)}


def test_the_plan_and_the_rate_follow_the_candidates_method():
    profile = load_profile("rtx5090-single-user", overrides=[METHODS])
    forecaster = Forecaster(profile, "0.5.23", 32607)
    card = load_card("rtx-5090")
    found = {method: planned(forecaster, method=method) for method in ("dflash", "dspark", "mtp", "none")}
    budgets = {method: forecaster.budget(flags) for method, flags in found.items()}
    drafts = {method: budget.pool_mib("draft weights") for method, budget in budgets.items()}
    assert drafts["dflash"] > drafts["dspark"] > drafts["mtp"] > drafts["none"] == 0
    assert budgets["none"].kv_tokens > budgets["mtp"].kv_tokens > budgets["dflash"].kv_tokens
    rates = {method: forecaster.rate(flags, card) for method, flags in found.items()}
    assert rates["dflash"] > rates["mtp"] > rates["none"]


def test_what_a_log_tells_of_a_draft_is_no_measure_for_another():
    profile = load_profile("rtx5090-single-user", overrides=[METHODS])
    forecaster = Forecaster(profile, "0.5.23", 32607)
    terms = Terms(context=1000.0, draft_weights=5000.0, after_load=300.0)
    after = forecaster.corrected(terms, "dspark")
    dflash, dspark = planned(forecaster, method="dflash"), planned(forecaster, method="dspark")
    assert after.budget(dspark).pool_mib("draft weights") == 5000.0
    assert after.budget(dflash).pool_mib("draft weights") == forecaster.budget(dflash).pool_mib(
        "draft weights"
    )
    assert after.budget(dflash).pool_mib("context") == 1000.0, "the machine is the same"
    assert after.subject(None, "dspark").draft == "qwen3.8-27b-dspark"
    assert after.subject(None).draft == "qwen3.8-27b-dflash2"


def test_mtp_is_planned_with_the_head_inside_its_target():
    profile = load_profile("rtx5090-single-user", overrides=[METHODS])
    own = profile.model_copy(update={"speculation": profile.speculation.model_copy(
        update={"method": "mtp", "draft": None})})  # fmt: skip
    flags = {"speculative-algorithm": "NEXTN", "mem-fraction-static": 0.85}
    assert Forecaster(own, "0.5.23", 32607).budget(flags).pool_mib("draft weights") > 500


def test_a_variable_that_changes_memory_changes_the_plan():
    profile = load_profile(
        "rtx5090-single-user", overrides=["search.env.PYTORCH_CUDA_ALLOC_CONF.choices=[x]"]
    )
    forecaster = Forecaster(profile, "0.5.23", 32607)
    plain = planned(forecaster)
    expandable = {**plain, "env.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert forecaster.budget(expandable).headroom_mib > forecaster.budget(plain).headroom_mib
    assert forecaster.question(expandable, 0.0).env == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def test_the_drafts_own_kv_type_changes_its_tokens():
    forecaster = Forecaster(load_profile("rtx5090-single-user"), "0.5.23", 32607)
    flags = planned(forecaster)
    # Otherwise it has the target's, eight bits.
    wider = {**flags, "speculative-draft-kv-cache-dtype": "bfloat16"}
    assert forecaster.budget(wider).kv_tokens < forecaster.budget(flags).kv_tokens
    assert forecaster.rate(wider, load_card("rtx-5090")) < forecaster.rate(flags, load_card("rtx-5090"))


def test_a_refusal_is_certain_where_the_engines_own_arithmetic_is():
    certain = forecast("rtx5090-four-users", **{"mem-fraction-static": 0.5})
    assert certain.certain
    likely = {"max-mamba-cache-size": 24, "max-total-tokens": 24576, "mem-fraction-static": 0.99}
    assert not forecast("rtx5090-four-users", **likely).certain


def test_what_long_use_took_in_a_proof_is_expected_of_what_is_alike():
    profile = load_profile("rtx5090-four-users")
    flags = {**model_flags(profile, simulated=True), **profile.flags, **profile.known[0].flags}
    plain = Forecaster(profile, "0.5.23", 32607)
    measured = measurement((100.0,), vram_used_mib=30_000, vram_total_mib=32_607)
    proof = Proof(
        seconds=1.0,
        answer_tokens=64,
        context_tokens=64,
        promised_tokens=64,
        free_mib=600,
        kv_tokens=None,
        problem=None,
    )
    chunk = {"chunked-prefill-size": 2048}
    told = trial(1, (100.0,), flags=flags | chunk, measured=measured, proof=proof, proves=1)
    knowing = plain.grown(told.model_copy(update={"boot": boot(chunked_prefill_size=2048)}))
    assert knowing.prospect(flags | chunk).chance < 0.5 * plain.prospect(flags | chunk).chance
    small = flags | {"chunked-prefill-size": 128}
    assert knowing.prospect(small).chance > knowing.prospect(flags | chunk).chance
    other = flags | {"method": "mtp"}
    assert knowing.prospect(other) == plain.prospect(other)
    assert plain.grown(trial(2, (100.0,), flags=flags)) is plain

import pytest

from dflash_deploy.compare.methods import METHODS, arm_of, read_drafts, read_methods
from dflash_deploy.engine.sglang.flags import FlagTable
from dflash_deploy.errors import DeployError
from dflash_deploy.profile.load import load_profile
from dflash_deploy.tune.launching import values

PROFILE = load_profile("rtx5090-single-user")


def drafting(flags):
    return {name: value for name, value in flags.items() if name.startswith("speculative-")}


def test_methods_are_read_in_their_order_and_once():
    assert read_methods(" dflash, none,dflash") == ("dflash", "none")
    for wrong in ("", ",", "eagle9", "none,magic"):
        with pytest.raises(DeployError) as error:
            read_methods(wrong)
        assert "none, ngram, mtp, dspark, dflash" in error.value.fix


def test_drafts_are_read():
    assert read_drafts(["dspark=/a=b"]) == {"dspark": "/a=b"}
    for wrong in ("dspark", "none=/x", "dflash="):
        with pytest.raises(DeployError):
            read_drafts([wrong])


def test_the_profiles_own_method_keeps_what_was_tuned_for_it():
    flags = arm_of(PROFILE, "dflash", {}, simulated=False).flags
    assert drafting(flags) == {
        "speculative-num-draft-tokens": 8,
        "speculative-algorithm": "DFLASH",
        "speculative-draft-model-path": "incoai/Qwen3.8-27B-DFlash2",
    }


def test_other_methods_differ_in_drafting_alone():
    arms = {method: arm_of(PROFILE, method, {}, simulated=False).flags for method in METHODS}
    rests = [
        {name: value for name, value in flags.items() if name not in drafting(flags)}
        for flags in arms.values()
    ]
    assert all(rest == rests[0] for rest in rests)
    assert rests[0]["mem-fraction-static"] == 0.85
    assert drafting(arms["none"]) == {}
    assert drafting(arms["mtp"])["speculative-num-steps"] == 3
    assert drafting(arms["dspark"])["speculative-draft-model-path"] == "RadixArk/Qwen3.8-27B-DSpark"
    for flags in arms.values():
        FlagTable.for_version("0.5.23").spell(values(flags))


def test_a_draft_that_the_person_names_comes_first():
    flags = arm_of(PROFILE, "dflash", {"dflash": "me/My-Draft"}, simulated=False).flags
    assert flags["speculative-draft-model-path"] == "me/My-Draft"


def test_the_profile_may_name_drafts_of_other_methods_and_the_method_of_what_is_known():
    inside = PROFILE.known[0].model_copy(
        update={"flags": {"method": "mtp", "speculative-num-draft-tokens": 6, "env.OMP_NUM_THREADS": "2"}}
    )
    drafts = PROFILE.speculation.model_copy(update={"drafts": {"dspark": "my/DSpark"}})
    profile = PROFILE.model_copy(update={"known": [inside], "speculation": drafts})
    arms = {method: arm_of(profile, method, {}, simulated=False).flags for method in METHODS}
    assert arms["dspark"]["speculative-draft-model-path"] == "my/DSpark"
    assert arms["mtp"]["speculative-num-steps"] == 5, "what was tuned, for the method that it was tuned for"
    assert "speculative-num-draft-tokens" not in arms["dflash"]
    assert all("method" not in flags and flags["env.OMP_NUM_THREADS"] == "2" for flags in arms.values())


def test_without_a_known_draft_the_person_is_asked_for_one():
    other = PROFILE.model_copy(
        update={"model": PROFILE.model.model_copy(update={"target": "somebody/else", "path": None})}
    )
    with pytest.raises(DeployError) as error:
        arm_of(other, "dspark", {}, simulated=False)
    assert "--draft dspark=" in error.value.fix

"""Back ends of FP8 products as a choice to measure, in an environment that is patched and one that is not."""

from __future__ import annotations

import pytest

from dflash_deploy.errors import DeployError
from dflash_deploy.profile.load import load_profile
from dflash_deploy.profile.schema import Choices
from dflash_deploy.serving_env.patches import ledger
from dflash_deploy.serving_env.patches.bmm import to_measure
from dflash_deploy.serving_env.patches.choices import PATCH
from dflash_deploy.serving_env.patches.description import load_patch
from dflash_deploy.serving_env.patches.operations import apply
from dflash_deploy.serving_env.patches.tree import find_tree
from dflash_deploy.tune.fp8 import SETTING, require_reader, without_broken
from tests.serving_env.patches.test_choices import CALLS, record
from tests.serving_env.patches.trees import FP8, install

SEARCHED = f"search.{SETTING}={{choices: [null, cudnn, cutlass]}}"


def tuned(*settings):
    return load_profile("rtx5090-single-user", overrides=settings)


@pytest.fixture
def environment(tmp_path):
    return install(tmp_path / "site-packages", files={FP8: CALLS})


def patched(environment, **outcomes):
    tree = find_tree(environment)
    apply(load_patch(PATCH), tree, {"backend": "cublas"}, decision=to_measure())
    if outcomes:
        kept = ledger.evidence_path(tree, PATCH)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(record(environment.parent, outcomes).read_text())
    return environment


def test_a_server_that_does_not_read_the_variable_is_not_launched(environment):
    for profile in (tuned(SEARCHED), tuned("env.DFLASH_BMM_FP8_BACKEND=cudnn")):
        with pytest.raises(DeployError, match="would do nothing here") as error:
            without_broken(profile, environment)
        assert f"dflash-deploy patch apply {PATCH}" in error.value.fix


def test_a_profile_that_names_none_needs_no_patch(environment):
    profile = tuned()
    assert without_broken(profile, environment) == (profile, ())


def test_what_the_probe_found_broken_is_left_out_and_told(environment):
    profile = tuned(SEARCHED)
    profile = profile.model_copy(
        update={
            "known": [
                profile.known[0],
                profile.known[0].model_copy(update={"name": "cutlass", "flags": {SETTING: "cutlass"}}),
            ]
        }
    )
    patched(environment, cublas="works", cudnn="works", cutlass="fails")
    left, notes = without_broken(profile, environment)
    assert left.search[SETTING] == Choices(choices=[None, "cudnn"])
    assert [known.name for known in left.known] == ["hand-tuned"]
    assert any("cutlass is not tried" in note and "NOT_INITIALIZED" in note for note in notes)
    require_reader(left, environment)


def test_the_default_is_left_out_too_where_it_does_not_work(environment):
    patched(environment, cublas="fails", cudnn="works", cutlass="works")
    left, notes = without_broken(tuned(SEARCHED), environment)
    assert left.search[SETTING] == Choices(choices=["cudnn", "cutlass"])
    assert "null is not tried" in notes[0]


def test_where_nothing_is_left_the_way_on_is_told(environment):
    patched(environment, cublas="works", cutlass="fails")
    with pytest.raises(DeployError, match="no choice of search") as error:
        without_broken(tuned(f"search.{SETTING}={{choices: [cutlass]}}"), environment)
    assert error.value.fix == f"leave it out: --set search.{SETTING}="


def test_without_a_record_all_are_tried_and_how_to_measure_is_told(environment):
    patched(environment)
    left, notes = without_broken(tuned(SEARCHED), environment)
    assert left.search[SETTING] == tuned(SEARCHED).search[SETTING]
    assert "patch measure" in notes[0]


def test_a_back_end_that_there_is_not_is_refused(environment):
    patched(environment)
    with pytest.raises(DeployError, match="a server would refuse to start"):
        without_broken(tuned(f"search.{SETTING}={{choices: [null, cuddn]}}"), environment)

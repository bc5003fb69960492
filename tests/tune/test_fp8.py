"""Back ends of FP8 products as a choice to measure, in an environment that is patched and one that is not."""

from __future__ import annotations

import sys

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


SERVER_ARGS = """
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        for name in ("--model-path", "--host", "--port", "--mem-fraction-static"):
            parser.add_argument(name)
"""
SERVER = """
import os
raise SystemExit("told: " + os.environ.get("DFLASH_BMM_FP8_BACKEND", "-"))
"""
PROFILE = """
summary: a server that ends at once
model: {target: a/b}
engine: {version: 0.5.23}
workload: {users: 1, context_tokens: 64, output_tokens: 8}
objective: {optimize: user_tokens_per_s}
search:
  env.DFLASH_BMM_FP8_BACKEND: {choices: [null, cudnn, cutlass]}
service: {name: test}
"""


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


def test_the_command_ends_before_its_first_launch_or_tells_what_it_leaves_out(tool, tmp_path):
    root = tmp_path / "venv"
    files = {
        FP8: CALLS,
        "sglang/srt/server_args.py": SERVER_ARGS,
        "sglang/launch_server.py": SERVER,
    }
    packages = install(root / "lib" / "python3.11" / "site-packages", version="0.5.23", files=files)
    python = root / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    tool.profile.write_text(PROFILE)
    command = ("tune", tool.profile, "--python", python, "--trials", "3", "--name", "s")

    refused = tool.run(*command)
    assert refused.code != 0
    assert "would do nothing here" in refused.err
    assert f"dflash-deploy patch apply {PATCH}" in refused.err
    assert not tool.studies.exists()

    patched(packages, cublas="works", cudnn="works", cutlass="fails")
    ended = tool.run(*command, DFLASH_BMM_FP8_BACKEND="cutlass")
    assert "env.DFLASH_BMM_FP8_BACKEND=cutlass is not tried: the FP8 probe found" in ended.out
    told = {
        record["flags"].get(SETTING, "-"): (
            tool.studies / "s" / "trials" / f"{number:04d}" / "server.log"
        ).read_text()
        for number, record in tool.trials("s").items()
    }
    # Left out, the variable is not inherited from the tuner's own shell either.
    assert {value: f"told: {value}" in log for value, log in told.items()} == {"-": True, "cudnn": True}

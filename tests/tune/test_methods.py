"""Ways to make draft tokens and variables of the server, searched by the command with the simulator."""

import json
from pathlib import Path

import pytest
import yaml

from dflash_deploy.deploy import configuration
from dflash_deploy.deploy.formats import render
from dflash_deploy.profile.load import load_profile
from dflash_deploy.tune.launching import shared_flags
from dflash_deploy.tune.reasons import reasons_of
from dflash_deploy.tune.records import trial_folder, write_record
from dflash_deploy.tune.space import space_of

from .conftest import PROFILE
from .samples import measurement, study, trial

EXPANDABLE = "expandable_segments:True"


@pytest.fixture
def wide(tool):
    """The small profile with methods and a variable to choose, and what is known of two of them."""
    content = yaml.safe_load(PROFILE)
    content["search"] = {
        "method": {"choices": ["dflash", "mtp", "none"]},
        "speculative-num-draft-tokens": {"choices": [4, 8]},
        "env.PYTORCH_CUDA_ALLOC_CONF": {"choices": [None, EXPANDABLE]},
    }
    content["flags"] |= {"mem-fraction-static": 0.92, "max-running-requests": 2}
    content["known"] = [
        {"name": "hand-tuned", "source": "a test", "flags": {"speculative-num-draft-tokens": 8}},
        {
            "name": "inside",
            "source": "a test",
            "flags": {
                "method": "mtp",
                "speculative-num-draft-tokens": 4,
                "env.PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE,
            },
        },
    ]
    tool.profile.write_text(yaml.safe_dump(content))
    return tool


def given(argv, flag):
    return argv[argv.index(flag) + 1] if flag in argv else None


def test_the_candidates_own_method_and_variables_are_launched_told_and_emitted(wide):
    # What the tuner's own shell exports reaches no server: the search decides on it.
    ended = wide.simulate(
        "--name", "s", "--trials", "3", "--baseline", "default", PYTORCH_CUDA_ALLOC_CONF=EXPANDABLE
    )
    assert ended.code == 0, ended.err
    records = wide.trials("s")
    hand, inside, default = records[1], records[2], records[3]
    assert [one["source"] for one in (hand, inside, default)] == [
        "known:hand-tuned",
        "known:inside",
        "known:default",
    ]
    assert given(hand["argv"], "--speculative-algorithm") == "DFLASH"
    assert given(hand["argv"], "--speculative-draft-model-path") == "incoai/Qwen3.8-27B-DFlash2"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in hand["env"]

    assert given(inside["argv"], "--speculative-algorithm") == "NEXTN"
    assert given(inside["argv"], "--speculative-num-steps") == "3"
    assert "--speculative-draft-model-path" not in inside["argv"]
    assert inside["env"]["PYTORCH_CUDA_ALLOC_CONF"] == EXPANDABLE
    assert not any(word.startswith(("--env", "--method")) for word in inside["argv"])
    # The simulator takes other memory with the variable, and with another draft.
    assert inside["measured"]["vram_used_mib"] < hand["measured"]["vram_used_mib"]
    assert inside["predicted"]["peak_mib"] == pytest.approx(inside["measured"]["vram_used_mib"], rel=0.05)
    assert hand["predicted"]["peak_mib"] == pytest.approx(hand["measured"]["vram_used_mib"], rel=0.05)
    assert "method=mtp" in ended.err
    assert f"env.PYTORCH_CUDA_ALLOC_CONF={EXPANDABLE}" in ended.err

    assert default["flags"]["method"] == "dflash"
    assert "speculative-num-draft-tokens" not in default["flags"]
    assert {one["name"] for one in ended.result["baselines"]} == {"hand-tuned", "inside", "default"}
    assert "with mtp the objective is" in ended.result["reasons"]["method"]

    told = wide.run("emit", "s", "--trial", "2", "--format", "command")
    assert f"PYTORCH_CUDA_ALLOC_CONF={EXPANDABLE}" in told.out
    assert "--speculative-algorithm NEXTN" in told.out
    assert "DFLASH" not in told.out

    again = wide.run("tune", "--resume", "s", "--trials", "4", "--least-gain", "0", "--json")
    assert again.code == 0, again.err
    after = wide.trials("s")
    assert {number: after[number] for number in records} == records
    tried = [json.dumps(one["flags"], sort_keys=True) for one in after.values() if one["proves"] is None]
    assert len(set(tried)) == len(tried)


def test_every_form_carries_the_variables_and_the_method_of_the_winner(study_of_two):
    chosen = configuration.of_study(str(study_of_two), None)
    spec = configuration.unit_spec(chosen, python=Path("/opt/env/bin/python"), manager="system", user=None)
    for form in ("systemd", "quadlet", "compose", "shell", "command"):
        text = render(spec, form, image="x/y:1" if form in ("quadlet", "compose") else None).text
        assert EXPANDABLE in text
        assert "PYTORCH_CUDA_ALLOC_CONF" in text
        assert "NEXTN" in text
        assert "env.PYTORCH" not in text
        assert "--method" not in text
    assert chosen.flags["speculative-num-steps"] == 3, "as the engine reads it, for what is kept of a service"


@pytest.fixture
def study_of_two(wide):
    """A study whose best drafts with MTP and has a variable, written as tune writes it."""
    profile = load_profile(str(wide.profile))
    folder = wide.studies / "written"
    flags = {
        **shared_flags(profile, simulated=True),
        **space_of(profile).whole(profile.known[1].flags),
    }
    write_record(folder / "study.json", study().model_copy(update={"name": "written", "profile": profile}))
    write_record(trial_folder(folder, 1) / "trial.json", trial(1, (100.0, 101.0), flags=flags))
    return folder


def test_the_plan_refuses_what_nobody_has_tuned_and_no_server_is_launched_for_it(tool):
    content = yaml.safe_load(PROFILE)
    # Sixteen people, whose state alone is more than the card has by default.
    content["workload"] |= {"users": 16}
    content["flags"] = {"mamba-ssm-dtype": "float32"}
    content["search"] = {"mem-fraction-static": {"choices": [0.9]}}
    content["known"] = []
    tool.profile.write_text(yaml.safe_dump(content))
    ended = tool.simulate("--name", "s", "--trials", "1", "--baseline", "default")
    first = tool.trials("s")[1]
    assert (first["source"], first["outcome"], first["argv"]) == ("known:default", "infeasible", [])
    assert first["reason"].endswith("(predicted)")
    assert ended.result["baselines"][0]["outcome"] == "infeasible"


def test_a_study_keeps_its_baseline_and_takes_no_other(tool):
    ended = tool.run("tune", "--resume", "s", "--baseline", "default")
    assert ended.code == 2
    assert "a study keeps its profile" in ended.err


def test_a_method_that_was_not_tried_says_what_the_plan_has_against_it(tool):
    content = yaml.safe_load(PROFILE)
    content["search"] = {"method": {"choices": ["dflash", "none"]}}
    content["flags"] |= {"mem-fraction-static": 0.92}
    content["known"] = []
    tool.profile.write_text(yaml.safe_dump(content))
    asked = study().model_copy(update={"profile": load_profile(str(tool.profile))})
    flags = {**shared_flags(asked.profile, simulated=True), **content["flags"], "method": "none"}
    measured = measurement((100.0, 101.0), vram_total_mib=32607)
    best = trial(1, (100.0, 101.0), flags=flags, measured=measured)
    why = reasons_of(asked, best, [best])["method"]
    assert why.startswith("dflash was not tried: the plan ends at sizing: ")
    assert why.endswith("(predicted)")

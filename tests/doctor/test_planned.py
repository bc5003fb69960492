from __future__ import annotations

import re

import pytest

from dflash_deploy import calibration
from dflash_deploy.doctor import planned as checks
from dflash_deploy.doctor.finding import Status
from dflash_deploy.errors import DeployError
from dflash_deploy.plan.calibration import Calibrated
from dflash_deploy.plan.terms import Terms

from .builders import engine, gpu, process, reading, subject

PROFILE = "rtx5090-single-user"
ROOMY = (
    "flags.max-total-tokens=20000",
    "flags.mem-fraction-static=0.9",
    "flags.mamba-ssm-dtype=bfloat16",
    "flags.max-running-requests=1",
    "workload.context_tokens=4096",
)


def test_the_card_of_the_profile():
    assert checks.card(subject(gpu())) is None
    answer = checks.card(subject(gpu(), profile=PROFILE))
    assert answer is not None
    assert answer.status is Status.PASS
    other = gpu(name="NVIDIA GeForce RTX 4090", memory_total_mib=24564, compute_capability="8.9")
    answer = checks.card(subject(other, profile=PROFILE))
    assert answer is not None
    assert (answer.status, answer.fix) == (Status.WARN, "dflash-deploy doctor rtx4090-single-user")
    answer = checks.card(subject(profile=PROFILE))
    assert answer is not None
    assert answer.status is Status.UNKNOWN


def test_a_plan_that_fits_passes_and_says_that_it_is_predicted():
    answer = checks.budget(subject(gpu(), profile=PROFILE, overrides=ROOMY))
    assert answer is not None
    assert (answer.status, answer.kind) == (Status.PASS, "predicted"), answer
    assert "MiB at the peak" in answer.text


def test_what_logs_of_this_machine_taught_is_planned_with(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    asked = {"profile": PROFILE, "overrides": ROOMY}
    before = checks.budget(subject(gpu(), **asked))
    card = "NVIDIA GeForce RTX 5090"
    one = calibration.Subject(card, "0.5.23", "qwen3.8-27b-nvfp4", "qwen3.8-27b-dflash2")
    calibration.keep(one, Calibrated(Terms(kernels=2640.0), None, None, ("kernels",)))
    after = checks.budget(subject(gpu(), **asked))
    assert before is not None
    assert after is not None
    assert "corrected by 1 boot log of this machine" in after.text
    assert "corrected by" not in before.text
    assert _peak_mib(after.text) == pytest.approx(_peak_mib(before.text) + 2000, abs=1)


def _peak_mib(text: str) -> int:
    return int(re.search(r"([\d,]+) of 32,607 MiB", text)[1].replace(",", ""))


def test_too_little_context_for_the_users_warns():
    answer = checks.budget(subject(gpu(), profile=PROFILE, overrides=("workload.context_tokens=200000",)))
    assert answer is not None
    assert (answer.status, answer.kind) == (Status.WARN, "predicted")
    assert "of the 200,000 tokens" in answer.text


def test_memory_that_others_hold_makes_it_fail_with_what_is_held():
    full = gpu(memory_used_mib=15_000, processes=(process(4242, 14_998),))
    answer = checks.budget(subject(full, profile=PROFILE, overrides=ROOMY))
    assert answer is not None
    assert (answer.status, answer.kind) == (Status.FAIL, "predicted")
    assert "15,000 MiB are held by others (measured)" in answer.text
    assert answer.fix


def test_a_card_that_is_too_small_fails():
    small = gpu(name="A card", memory_total_mib=12_000, memory_free_mib=11_800)
    answer = checks.budget(subject(small, profile=PROFILE))
    assert answer is not None
    assert answer.status is Status.FAIL


def test_without_card_or_model_nothing_is_planned():
    nowhere = subject(gpus=reading(), profile="sglang-cpu-smoke", overrides=("flags.device=cuda",))
    answer = checks.budget(nowhere)
    assert answer is not None
    assert answer.status is Status.UNKNOWN
    unknown_model = subject(gpu(), profile=PROFILE, overrides=("model={target: somebody/something}",))
    answer = checks.budget(unknown_model)
    assert answer is not None
    assert answer.status is Status.UNKNOWN
    assert checks.budget(subject(gpu())) is None


def test_flags_that_the_engine_takes_pass():
    assert checks.flags(subject(gpu())) is None
    answer = checks.flags(subject(gpu(), profile=PROFILE))
    assert answer is not None
    assert answer.status is Status.PASS, answer


def test_flags_that_work_against_each_other_are_told():
    wrong = subject(gpu(), profile=PROFILE, overrides=("flags.enable-linear-replayssm-spec=true",))
    answer = checks.flags(wrong)
    assert answer is not None
    assert answer.status is Status.FAIL
    assert answer.evidence


def test_the_installed_engine_decides_which_flags_there_are():
    own = ("flags.mamba-radix-cache-strategy=extra_buffer_lazy",)
    old = subject(gpu(), profile=PROFILE, overrides=own, engine=engine(version="0.5.14"))
    new = subject(gpu(), profile=PROFILE, overrides=own, engine=engine())
    answer = checks.flags(new)
    assert answer is not None
    assert answer.status is Status.PASS
    try:
        answer = checks.flags(old)
    except DeployError as error:
        assert "would refuse" in error.message
    else:
        assert answer is not None
        assert answer.status is Status.FAIL


@pytest.mark.parametrize("card", [gpu(), gpu(memory_total_mib=None, memory_used_mib=None)])
def test_a_profile_with_an_mtp_head_is_planned(card):
    mtp = subject(card, profile=PROFILE, overrides=("speculation={method: mtp}", *ROOMY))
    answer = checks.budget(mtp)
    assert answer is not None
    assert answer.kind == "predicted"

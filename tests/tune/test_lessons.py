"""What one trial's log teaches the forecasts of those after it, and where that is kept."""

from __future__ import annotations

import io

import pytest

from dflash_deploy import calibration
from dflash_deploy.machine.cards import load_card
from dflash_deploy.profile.load import load_profile
from dflash_deploy.tune.launching import Simulated, simulated_launcher
from dflash_deploy.tune.screen import screen_for
from dflash_deploy.tune.study import Effort, Rig, create_study, run_study
from dflash_deploy.tune.trial import Gauge


@pytest.mark.parametrize("seed", ["2", "9"])
def test_a_trial_makes_the_next_forecast_a_good_one(tool, seed):
    ended = tool.simulate("--trials", "3", "--least-gain", "0", "--name", "s", "--seed", seed)
    assert ended.code == 0, ended.err
    trials = [trial for trial in tool.trials("s").values() if trial["measured"]]
    first, *others = sorted(trials, key=lambda trial: trial["number"])
    assert first["predicted"]["calibrated_by"] == 0
    assert others
    for trial in others:
        assert trial["predicted"]["calibrated_by"] >= 1
        assert trial["predicted"]["peak_mib"] == pytest.approx(trial["measured"]["vram_used_mib"], abs=256)
    kept = tool.home / "state" / "dflash-deploy" / "calibration"
    assert not kept.exists(), "what a simulated card teaches would correct the plans of a real one"

    again = tool.run("tune", "--resume", "--name", "s", "--trials", "4", "--least-gain", "0", "--json")
    assert again.code == 0, again.err
    last = max(tool.trials("s").values(), key=lambda trial: trial["number"])
    assert last["predicted"]["calibrated_by"] >= 3


def test_what_a_real_card_teaches_is_kept_for_the_next_study(tool, monkeypatch):
    """The stand-in server plays the real one here: the study is none that is called simulated."""
    for kind in ("state", "config", "cache"):
        monkeypatch.setenv(f"XDG_{kind.upper()}_HOME", str(tool.home / kind))
    profile = load_profile(str(tool.profile))
    card = load_card("rtx-5090")
    launcher = simulated_launcher(profile, Simulated(card.id, 4, 100.0), host="127.0.0.1", port=None)
    rig = Rig(launcher, card.memory_mib, Gauge(lambda: 0, card.memory_mib))

    def run(name: str) -> list:
        folder, study = create_study(
            name,
            profile,
            profile_name="small",
            simulated=False,
            card=card.id,
            engine_version="0.5.23",
            time_scale=1.0,
            seed=1,
        )
        with screen_for(io.StringIO(), study, []) as screen:
            return run_study(folder, study, rig, Effort(1), screen)[0]

    (before,) = run("one")
    (record,) = calibration.records()
    assert (record.machine, record.version, record.boots) == (card.name, "0.5.23", 1)
    assert record.target == "qwen3.8-27b-nvfp4"
    (after,) = run("two")
    assert (before.predicted.calibrated_by, after.predicted.calibrated_by) == (0, 1)
    errors = [abs(one.predicted.peak_mib - one.measured.vram_used_mib) for one in (before, after)]
    assert errors[1] < 256
    assert [one.boots for one in calibration.records()] == [2]

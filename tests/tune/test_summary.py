import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

from dflash_deploy.bench.measurement import Measurement
from dflash_deploy.tune.gain import gain
from dflash_deploy.tune.records import Predicted
from dflash_deploy.tune.summary import Baseline, Best, Summary, Trial, lines, repeated_line, summarize

from .samples import study, trial

KNOWN = [{"name": "hand-tuned", "source": "somebody", "flags": {"max-running-requests": 2}}]
FLAGS = {"model-path": "/models/with a space", "max-running-requests": 3, "disable-radix-cache": True}


def told(trials, **given):
    asked = study(**({"known": KNOWN} | given))
    summary = summarize(Path("/somewhere"), asked, trials, "trials")
    return summary, "\n".join(lines(asked, summary))


def test_a_better_one_is_told_with_its_gain_by_round():
    known = trial(1, (100.0, 110.0, 105.0), source="known:hand-tuned")
    summary, text = told([known, trial(2, (106.0, 115.5, 112.35), flags=FLAGS)])
    assert summary.best.trial == 2
    assert summary.baselines[0].distinguishable
    assert "faster than hand-tuned (trial 1, 105.00 tokens/s in all (simulated)) by 6.0%" in text
    assert "(95% interval +3.5% to +8.5%)" in text
    assert summary.next_command == "dflash-deploy emit sample"
    assert "every figure above is simulated" in text


def test_the_command_is_quoted_for_a_shell_and_has_the_services_address_and_environment():
    summary, text = told([trial(1, (100.0,), flags=FLAGS)], env={"TOKENS": "a b"})
    words = shlex.split(summary.best.command)
    assert words[:3] == ["env", "TOKENS=a b", "python"]
    assert words[words.index("--model-path") + 1] == "/models/with a space"
    assert words[words.index("--port") + 1] == "30000"
    assert "--disable-radix-cache" in words
    assert summary.best.command in text


def test_where_nothing_is_distinguishably_better_the_known_one_is_kept_and_said_so():
    known = trial(1, (100.0, 110.0, 105.0), source="known:hand-tuned", flags=FLAGS)
    summary, text = told([known, trial(2, (101.0, 109.0, 106.0), flags=FLAGS)])
    assert summary.best.trial == 1
    assert "nothing that was tried is distinguishably better than hand-tuned" in text


def test_a_single_round_claims_no_more_than_it_tells():
    known = trial(1, (100.0,), source="known:hand-tuned", flags=FLAGS)
    summary, text = told([known, trial(2, (210.0,))])
    assert summary.best.trial == 2
    assert summary.best.interval is None
    assert not summary.baselines[0].distinguishable
    assert "by 110.0% (in the only round, which tells no interval)" in text


def test_a_known_setting_without_a_figure_is_told_with_its_reason():
    known = trial(1, source="known:hand-tuned", reason="load: no space", flags=FLAGS)
    summary, text = told([known, trial(2, (100.0,), flags=FLAGS)])
    assert summary.baselines[0].gain is None
    assert "against hand-tuned (trial 1, not measured): failed, load: no space" in text


def test_nothing_feasible_is_told_by_reasons_with_what_to_change():
    trials = [
        trial(1, reason="load: no space"),
        trial(2, reason="load: no space"),
        trial(3, outcome="infeasible", reason="by the plan …", argv=[]),
    ]
    summary, text = told(trials)
    assert summary.best is None
    assert summary.next_command is None
    assert "2 launches (2 failed), 1 more refused by the plan" in text
    assert "2 x failed: load: no space" in text
    assert "what to change (infeasible)" in text
    assert "/somewhere" in text


def test_the_object_has_the_promised_keys():
    known = trial(1, (100.0, 110.0), source="known:hand-tuned", flags=FLAGS)
    content = json.loads(told([known, trial(2)])[0].model_dump_json())
    assert {"study", "best", "baselines", "trials"} <= set(content)
    promised = {"trial", "flags", "measured", "predicted", "simulated", "objective", "spread"}
    assert promised <= set(content["best"])
    assert content["best"]["simulated"] is True
    assert [one["outcome"] for one in content["trials"]] == ["served", "failed"]
    assert content["unchecked_limits"] == []


def test_every_key_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    section = text.split("## tune --json")[1].split("\n## ")[0]
    known = set(re.findall(r"`([a-z_0-9]+)`", section))
    models = (Summary, Best, Baseline, Trial, Predicted)
    keys = {name for model in models for name in model.model_fields}
    keys |= {field.name for field in fields(Measurement)}
    assert keys <= known, keys - known


def test_a_figure_that_is_the_same_to_the_last_digit_was_timed_all_the_same():
    quick, again = trial(1, (100.0, 101.0)), trial(2, (100.0, 101.0))
    found = gain(again, quick, "total_tokens_per_s")
    assert repeated_line(found, "total_tokens_per_s").endswith("(95% interval +0.0% to +0.0%)")
    assert repeated_line(found, "context_tokens").endswith("(counted, not timed)")

import csv
import io
import json

import pytest

from dflash_deploy.bench.results import LoadRows, Tail
from dflash_deploy.compare.summary import summarize
from dflash_deploy.compare.tables import as_csv, as_json, as_markdown, as_text

from .samples import AGREED, result_of, round_of, run_of

PLAIN = run_of("none", [62.0, 62.2, 62.1])
DFLASH = run_of("dflash", [207.0, 208.0, 206.5], accept_length=4.6, quality=AGREED)


def test_a_method_is_told_apart_from_plain_decoding_round_by_round():
    plain, dflash = summarize(result_of(PLAIN, DFLASH))
    assert plain.speed_up is None
    assert dflash.speed_up.verdict == "faster"
    assert dflash.speed_up.ratio == pytest.approx(207 / 62.1, rel=0.01)
    assert dflash.rounds == 3
    assert dflash.user_tokens_per_s.median == 207.0
    assert (dflash.same_text, dflash.compared_text, dflash.diverge_after) == (10, 12, 81.0)
    assert (dflash.right, dflash.asked) == (9, 10)


def test_cold_rounds_are_shown_and_do_not_count():
    (row,) = summarize(result_of(run_of("none", [60.0, 60.0], users=2)))
    assert row.rounds == 2
    text = as_text(result_of(run_of("none", [60.0, 60.0], users=2)))
    assert "cold" in text
    assert "none: 2 at once (measured)" in text


def test_launches_of_one_method_are_taken_together():
    runs = [run_of("none", [60.0, 61.0]), run_of("none", [60.5, 61.5], repeat=2)]
    (row,) = summarize(result_of(*runs))
    assert (row.launches, row.rounds) == (2, 4)


def test_from_three_launches_on_launches_are_compared_and_not_rounds():
    def runs(name, levels):
        return [run_of(name, [level, level * 1.001], repeat=n) for n, level in enumerate(levels, 1)]

    # Two per cent by rounds; but starts of one server differ by more.
    few = result_of(*runs("none", [100, 100]), *runs("dflash", [102, 102]))
    assert summarize(few)[1].speed_up.verdict == "faster"
    assert "over rounds" in as_text(few)
    many = result_of(*runs("none", [100, 104, 98]), *runs("dflash", [102, 101, 104]))
    assert summarize(many)[1].speed_up.verdict == "indistinguishable"
    assert summarize(many)[1].speed_up.rounds == 3
    assert "over launches" in as_text(many)


def test_methods_that_differ_by_nothing_are_not_told_apart():
    rows = summarize(result_of(PLAIN, run_of("ngram", [62.1, 62.0, 62.2])))
    assert rows[1].speed_up.verdict == "indistinguishable"
    assert "keep the simpler" in as_text(result_of(PLAIN, run_of("ngram", [62.1, 62.0, 62.2])))


def test_what_failed_is_told_with_its_reason():
    failed = run_of("mtp", [1.0], outcome="failed", reason="load: CUDA out of memory", loads=[])
    text = as_text(result_of(PLAIN, failed))
    assert "mtp: failed: load: CUDA out of memory" in text
    row = summarize(result_of(PLAIN, failed))[1]
    assert (row.rounds, row.tokens_per_s, row.speed_up) == (0, None, None)


def test_every_table_says_whether_it_was_measured():
    for kind in ("measured", "simulated"):
        result = result_of(PLAIN, DFLASH, kind=kind)
        assert f"(all figures {kind})" in as_text(result)
        assert kind in as_markdown(result)
        assert next(csv.DictReader(io.StringIO(as_csv(result))))["kind"] == kind
        assert json.loads(as_json(result))["kind"] == kind


def test_csv_holds_every_figure_with_its_unit():
    plain, dflash = csv.DictReader(io.StringIO(as_csv(result_of(PLAIN, DFLASH))))
    assert plain["speed_up"] == ""
    assert float(dflash["user_tokens_per_s"]) == 207.0
    assert dflash["verdict"] == "faster"
    assert dflash["vram_used_mib"] == "30000"


def test_each_load_has_a_line_of_its_own_with_the_same_figures_in_every_form():
    loads = [
        LoadRows(
            users=users,
            label=f"{users} users",
            rounds=[round_of(f"{users} users", speed, users=users)],
            tails={"ttft_s": Tail(median=0.125 * users, p95=0.5, p99=0.75)},
            prompt_tokens=1000 * users,
            prefill_tokens_per_s=900.0 / users,
        )
        for users, speed in ((2, 90.0), (8, 30.0))
    ]
    result = result_of(run_of("bench", [1.0], loads=loads, flags=None, url="u"))
    lines = list(csv.DictReader(io.StringIO(as_csv(result))))
    assert [(line["load"], line["users"]) for line in lines] == [("2 users", "2"), ("8 users", "8")]
    assert [float(line["tokens_per_s"]) for line in lines] == [180.0, 240.0]
    assert [float(line["ttft_s"]) for line in lines] == [0.25, 1.0]
    assert [float(line["ttft_p95_s"]) for line in lines] == [0.5, 0.5]
    assert [float(line["prefill_tokens_per_s"]) for line in lines] == [450.0, 112.5]
    summary = json.loads(as_json(result))["summary"]
    assert [row["tokens_per_s"] for row in summary] == [180.0, 240.0]
    for text in (as_text(result), as_markdown(result).replace("|", " ")):
        rows = [line.split() for line in text.splitlines() if line.split()[1:2] == ["users"]]
        assert [row[:7] for row in rows] == [
            ["2", "users", "450", "180.0", "90.0", "0.250", "0.500"],
            ["8", "users", "112", "240.0", "30.0", "1.000", "0.500"],
        ]


def test_csv_starts_no_formula():
    (row,) = csv.DictReader(io.StringIO(as_csv(result_of(run_of("=cmd()", [60.0])))))
    assert row["method"] == "'=cmd()"


def test_markdown_is_a_table_that_no_name_breaks():
    text = as_markdown(result_of(run_of("a|b<script>", [60.0])))
    lines = text.splitlines()
    assert lines[3].count("|") == lines[2].count("|")
    assert "a\\|b\\<script\\>" in text


def test_no_servers_words_reach_the_terminal():
    run = run_of("x\x1b[2J", [60.0], model="m\x1b]0;gone\x07", notes=["a\nb\x9b31m"], flags=None, url="u")
    for result in (result_of(run), result_of(run.model_copy(update={"flags": {}}))):
        for text in (as_text(result), as_markdown(result), as_csv(result)):
            assert not set(text) & set("\x1b\x07\x9b")


def test_json_holds_the_result_file():
    found = json.loads(as_json(result_of(PLAIN, DFLASH)))
    assert [row["method"] for row in found["summary"]] == ["none", "dflash"]
    assert found["result"]["workload"]["sha256"] == "0" * 64
    (only,) = json.loads(as_json(result_of(run_of("none", [60.0]))))["summary"]
    assert only["speed_up_high"] is None


def test_minutes_drift_among_those_of_as_many_users_alone():
    def soak(speeds):
        return [
            LoadRows(users=users, label=f"minute {n}", window=True, rounds=[round_of(f"minute {n}", speed)])
            for users, minutes in speeds.items()
            for n, speed in enumerate(minutes, 1)
        ]

    steady = {1: [50.0, 51.0, 50.0, 51.0, 50.0], 4: [150.0, 151.0, 150.0, 151.0, 150.0]}
    assert "drifts" not in as_text(result_of(run_of("bench", [1.0], flags=None, loads=soak(steady))))
    slowing = steady | {4: [150.0, 149.0, 147.0, 144.0, 140.0]}
    text = as_text(result_of(run_of("bench", [1.0], flags=None, loads=soak(slowing))))
    assert "4 at once: speed drifts by -" in text
    assert text.count("drifts") == 1

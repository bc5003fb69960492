"""The four forms of a report, of studies in every state and with hostile records."""

import base64
import csv
import hashlib
import io
import json
import os
import re
import shlex
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from dflash_deploy.cli import app_of
from dflash_deploy.report.contents import read_report
from dflash_deploy.report.data import render_json
from dflash_deploy.report.markdown import render_markdown
from dflash_deploy.report.page import render_page
from dflash_deploy.report.table import render_csv
from dflash_deploy.report.verdict import verdict
from dflash_deploy.report.words import folded
from dflash_deploy.tune.journal import Journal
from dflash_deploy.tune.records import Candidate, trial_folder, write_record
from dflash_deploy.tune.screen import PlainScreen
from dflash_deploy.tune.studies import studies_dir
from tests.tune import samples

from .studies import study_of, usual

SECTIONS = ["verdict", "command", "comparison", "pareto", "timeline", "memory", "importance", "failures"]
SECTIONS += ["output", "trials", "machine"]
WRITTEN_BEFORE = Path(__file__).parent / "written_before"
HOSTILE = "<script>alert(1)</script><img src=x onerror=y> ]]> '\"` | \u202e[a](https://evil.example) \x1b[31m"


class Page(HTMLParser):
    """What a browser would make of a page, as far as these tests care."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.words = ""
        self._open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        if self._open and self._open[-1] == tag:
            self._open.pop()

    def handle_data(self, data):
        if self._open:
            self.texts[self._open[-1]] = self.texts.get(self._open[-1], "") + data
        else:
            self.words += data

    @property
    def ids(self) -> list[str]:
        return [attrs["id"] for tag, attrs in self.tags if tag == "section" and "id" in attrs]


def test_a_page_says_it_all(tmp_path):
    report = read_report(usual(tmp_path))
    page = Page(render_page(report))
    assert page.ids == SECTIONS
    assert verdict(report) == (
        "Take trial 2, the best of 4 launches: 111.00 tokens/s in all (simulated), faster than hand-tuned by "
        "10.7% (95% interval +6.6% to +15.6%)."
    )
    for words in (
        verdict(report),
        "Simulated: no figure here says anything about a real card",
        "--max-running-requests 2",
        "decode-capture: out of memory",
        "refused by the plan",
        "trials 4, 5",
        "loop: 2 of 6 answers, for example abab",
        "Once upon a time\nthere was a card.",
        "fewer than 8 tell nothing",
        "The engine's default settings were not tried",
    ):
        assert words in page.words


def test_the_page_s_own_policy_lets_it_run_its_own_script_alone(tmp_path):
    page = Page(render_page(read_report(usual(tmp_path))))
    (policy,) = [attrs["content"] for tag, attrs in page.tags if "http-equiv" in attrs]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.texts[kind].encode()).digest()).decode()
        assert rules[f"{kind}-src"] == f"'sha256-{digest}'"
    assert rules["default-src"] == "'none'"
    for tag, attrs in page.tags:
        assert "style" not in attrs, f"{tag}: the policy forbids it"
        assert not {"src", "srcset", "action"} & set(attrs)
        assert attrs.get("href") in (None, "data:,")
    assert "url(" not in page.texts["style"]
    assert "@import" not in page.texts["style"]


def hostile(folder: Path) -> Path:
    trial = samples.trial(1, rounds=(1.0, 2.0)).model_copy(
        update={"source": f"known:{HOSTILE}", "flags": {"served-model-name": HOSTILE[:60]}}
    )
    measured = samples.measurement(samples=(HOSTILE,), faults=(HOSTILE,))
    bad = samples.trial(2, outcome="bad-output", reason=HOSTILE, measured=measured)
    return study_of([trial, bad], folder, env={"HF_TOKEN": "hf_private", "NCCL_DEBUG": "WARN"})


def test_records_cannot_write_markup(tmp_path):
    report = read_report(hostile(tmp_path))
    page, usual_page = Page(render_page(report)), Page(render_page(read_report(usual(tmp_path / "b"))))
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in usual_page.tags}
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert not [attrs for _, attrs in page.tags if any(name.startswith("on") for name in attrs)]
    assert "<script>alert(1)</script>" in page.words
    markdown = render_markdown(report)
    outside = re.sub(r"^```sh\n.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    assert not re.search(r"(?<!\\)<|(?<!\\)\]\(|https://", outside)
    for text in (render_page(report), markdown):
        assert "\u202e" not in text
        assert "\x1b" not in text
        assert "hf_private" not in text
        assert "WARN" in text
    assert "hf_private" not in render_json(report)


@settings(max_examples=40)
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=80))
def test_any_reason_is_shown_as_text(tmp_path_factory, reason):
    folder = study_of([samples.trial(1, reason=reason)], tmp_path_factory.mktemp("study"))
    report = read_report(folder)
    shown = "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in reason.split("\n"))
    assert (shown or "no reason told") in Page(render_page(report)).words
    (row,) = csv.DictReader(io.StringIO(render_csv(report), newline=""))
    assert row["reason"].removeprefix("'") == reason.removeprefix("'")
    assert not row["reason"].startswith(("=", "+", "-", "@", "\t", "\r"))
    assert json.loads(render_json(report))["failures"][0]["reason"] == (reason or "no reason told")
    assert render_markdown(report).count("\n## ") == 7


def test_texts_that_nobody_read_are_not_called_right(tmp_path):
    counted = study_of(
        [samples.trial(1, rounds=(1.0, 2.0))], tmp_path / "study", measure={"check_output": False}
    )
    for shown in (
        render_markdown(read_report(counted)),
        Page(render_page(read_report(counted))).words,
    ):
        assert "only tokens to be counted, not text to be read" in shown
        assert "were looked at" not in shown
    assert "trials were looked at" in render_markdown(read_report(usual(tmp_path / "usual")))


def test_a_table_has_a_row_a_trial(tmp_path):
    rows = list(csv.DictReader(io.StringIO(render_csv(read_report(usual(tmp_path))), newline="")))
    assert [row["trial"] for row in rows] == list("123456")
    assert {row["kind"] for row in rows} == {"simulated"}
    assert (rows[1]["total_tokens_per_s"], rows[1]["launch_s"], rows[1]["measure_s"]) == (
        "111.0",
        "30.0",
        "40.0",
    )
    assert rows[3]["launch_s"] == rows[3]["objective"] == ""
    assert rows[3]["max-running-requests"] == "4"


def test_the_object_has_the_keys_that_are_documented(tmp_path):
    told = json.loads(render_json(read_report(usual(tmp_path))))
    documented = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    section = documented.split("## report --format json")[1].split("\n## ")[0]
    for key in told:
        assert f"`{key}`" in section
    assert told["best"]["trial"] == 2
    assert told["state"] == "at rest"
    assert [failure["trials"] for failure in told["failures"]] == [[3], [6], [4, 5]]


def test_a_study_without_a_trial_and_one_that_served_nothing(tmp_path):
    empty = read_report(study_of([], tmp_path / "empty"))
    assert verdict(empty) == "No trial has ended yet, so there is nothing to say."
    nothing = read_report(study_of([samples.trial(1, reason="load: no such file")], tmp_path / "nothing"))
    assert verdict(nothing) == (
        "No configuration served within the limits in 1 launch; most often: load: no such file."
    )
    for report in (empty, nothing):
        assert Page(render_page(report)).ids == SECTIONS
        assert "There is none." in render_markdown(report)
        assert json.loads(render_json(report))["best"] is None


def test_when_nothing_beats_the_known_setting_it_is_kept(tmp_path):
    trials = [
        samples.trial(1, rounds=(100.0, 102.0), source="known:hand-tuned"),
        samples.trial(2, rounds=(101.0, 101.0)),
    ]
    report = read_report(study_of(trials, tmp_path))
    assert verdict(report) == (
        "Keep hand-tuned: 102.00 tokens/s in all (simulated); nothing else in 2 launches is distinguishably "
        "better."
    )


def test_a_known_setting_that_does_not_serve_is_no_measure(tmp_path):
    trials = [
        samples.trial(1, source="known:hand-tuned", reason="sizing: no memory"),
        samples.trial(2, rounds=(101.0, 101.0)),
    ]
    report = read_report(study_of(trials, tmp_path))
    assert verdict(report) == (
        "Take trial 2, the best of 2 launches: 101.00 tokens/s in all (simulated), "
        "where hand-tuned did not serve."
    )
    assert "sizing: no memory" in Page(render_page(report)).words


def test_a_study_that_runs_and_one_that_was_cut_short(tmp_path):
    folder = usual(tmp_path)
    begun = Candidate(number=7, source="search", flags={}, started=datetime(2026, 1, 1, tzinfo=UTC))
    write_record(trial_folder(folder, 7) / "candidate.json", begun)
    report = read_report(folder)
    assert report.state == "cut short"
    assert "--resume sample" in Page(render_page(report)).words
    with Journal(folder, PlainScreen(None, report.study, [])):
        running = read_report(folder)
    assert running.state == "running"
    assert verdict(running).startswith("So far, take trial 2")
    assert "this page shows what had ended" in Page(render_page(running)).words
    # One that was here once, and whose number another has now.
    (folder / "tuner.json").write_text(
        json.dumps(
            {
                "process": {"pid": os.getpid(), "start_ticks": 1},
                "boot_id": "",
                "pid_namespace": "",
                "started": "2026-01-01T00:00:00Z",
            }
        )
    )
    assert read_report(folder).state == "cut short"


def test_records_of_the_version_before(tmp_path):
    report = read_report(WRITTEN_BEFORE)
    page = Page(render_page(report))
    assert page.ids == SECTIONS
    assert verdict(report).startswith("Take trial 15, the best of 5 launches: 223.28 tokens/s a user")
    assert "No sample was kept." in page.words
    assert report.best_record.boot.state_cache.total_gib * 1024 == report.memory.observed["state cache"]
    assert sum(report.memory.observed.values()) == 30_042
    assert report.memory.error is not None
    assert report.memory.error < 0.05


def test_a_command_over_several_lines_is_the_same_command():
    command = shlex.join(
        ["env", "A=b c", "python", "-m", "x", "--path", "it's", "--flag", "--list", "1", "2"]
    )
    assert folded(command).count("\n") == 3
    assert shlex.split(folded(command).replace("\\\n", " ")) == shlex.split(command)


def run(*words: str):
    return CliRunner().invoke(app_of(["report"]), ["report", *words])


def test_the_command_writes_beside_the_study(tmp_path):
    usual(studies_dir() / "s")
    for form, name in {"html": "report.html", "md": "report.md", "json": "report.json"}.items():
        ended = run("s", "--format", form)
        assert ended.exit_code == 0
        assert ended.output.strip() == str(studies_dir() / "s" / name)
        assert (studies_dir() / "s" / name).read_text()
    assert run("--out", str(tmp_path)).output.strip() == str(tmp_path / "report.html")
    assert run("s", "--format", "csv", "--out", str(tmp_path / "t.csv")).exit_code == 0
    printed = run("s", "--format", "csv", "--out", "-")
    assert printed.stdout_bytes == (tmp_path / "t.csv").read_bytes()
    missing = run("nothing-of-this-name")
    assert "there is no study" in str(missing.exception)

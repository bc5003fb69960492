"""The catalogue: every entry proves itself, patterns keep their rules, and the page follows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.diagnosis import diagnose
from dflash_deploy.diagnosis.catalogue import load_catalogue, read_entries
from dflash_deploy.diagnosis.page import page
from dflash_deploy.diagnosis.pattern import PatternError, parse_pattern
from dflash_deploy.diagnosis.scan import Index
from dflash_deploy.diagnosis.selftest import failures
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.resources import resource_dir

from . import logs

PATTERNS = sorted({p.text for e in load_catalogue() for p in (*e.patterns, *e.needs, *e.unless)})

ENTRY = """
- id: shelf-fell
  stage: load
  patterns: 'shelf <number:int> fell after <weight:number> kg'
  cause: 'shelf {number} held {weight} kg'
  fix:
    text: 'put {down(weight / 2, 1)} kg on it'
    flags: {shelf-load: '{down(weight / 2, 1)}'}
  evidence: a carpenter
  examples:
    log: 'ShelfError: shelf 7 fell after 12.5 kg'
    fix_holds: '6.2 kg'
"""


def test_every_entry_is_found_in_its_own_examples():
    assert failures(load_catalogue()) == []


def test_the_page_of_failures_is_the_catalogue():
    written = Path(__file__).parents[2] / "docs" / "failures.md"
    assert written.read_text() == page(load_catalogue()), (
        "python -m dflash_deploy.diagnosis.page > docs/failures.md"
    )


def test_patches_that_a_fix_names_are_there():
    texts = " ".join(rule.text.text for entry in load_catalogue() for rule in entry.fixes)
    named = set(re.findall(r"dflash-deploy patch apply ([\w-]+)", texts))
    assert named
    assert named <= {path.name for path in resource_dir("patches").iterdir()}


def test_an_entry_is_added_without_code(tmp_path):
    file = tmp_path / "new.yaml"
    file.write_text(ENTRY)
    entries = read_entries(file)
    assert failures(entries) == []
    root = diagnose(["ShelfError: shelf 7 fell after 12.5 kg"], index=Index(entries)).root
    assert (root.id, dict(root.fix.flags)) == ("shelf-fell", {"shelf-load": 6.2})


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("fell after 12.5", "stands under 12.5", "example 1"),
        ("6.2 kg", "9 kg", "fix"),
    ],
)
def test_the_self_test_tells_an_entry_that_does_not_hold(tmp_path, old, new, told):
    file = tmp_path / "new.yaml"
    file.write_text(ENTRY.replace(old, new))
    assert told in failures(read_entries(file))[0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("shelf <number:int> fell", "(shelf){1,9} fell"),
        ("shelf <number:int> fell after", "shelf.*after"),
        ("down(weight / 2, 1)", "open(weight)"),
        ("stage: load", "stage: attic"),
        ("cause:", "because:"),
    ],
)
def test_a_wrong_entry_is_refused_by_name(tmp_path, old, new):
    file = tmp_path / "new.yaml"
    file.write_text(ENTRY.replace(old, new))
    with pytest.raises(DeployError) as refused:
        read_entries(file)
    assert "shelf-fell" in refused.value.message
    assert refused.value.exit_code is ExitCode.INVALID_INPUT


@pytest.mark.parametrize(
    "text", ["a+ long words", "long words (x|y){2,3}", "long|words", "x.y", "(open long words"]
)
def test_patterns_that_could_run_away_or_find_everything_are_refused(text):
    with pytest.raises(PatternError):
        parse_pattern(text)


def test_no_pattern_runs_away_on_lines_made_against_it():
    # A search that backtracks without bound would never come back; the test's own deadline ends it.
    for text in PATTERNS:
        pattern = parse_pattern(text)
        for words in pattern.exact:
            for line in (words * (4096 // len(words)), (words + " ") * 200 + "(" * 2000, words + "a" * 4000):
                pattern.search(line[:4096])


def test_lines_of_a_serving_server_cost_one_look():
    index = Index(load_catalogue())
    for line in logs.BOOT["serving"][1:]:
        small = line.lower().encode()
        patterns, mark = index.candidates(small.translate(None, b"0123456789"), small)
        held = {words for number in patterns for words in index.held[number][0].exact}
        assert not mark
        assert not any(words in line.lower() for words in held), line


@given(st.text(max_size=60))
def test_any_text_is_a_pattern_or_refused(text):
    try:
        pattern = parse_pattern(text)
    except PatternError:
        return
    assert all(len(words) >= 4 for words in pattern.words)

"""The report's page in a real browser: by day, by night, and on a phone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_deploy.report.contents import read_report
from dflash_deploy.report.page import render_page
from tests.report.studies import study_of, usual
from tests.report.test_forms import SECTIONS, WRITTEN_BEFORE, hostile

from .chromium import Page, chromium, find_chromium

PROGRAM = find_chromium()
HOW_TO_GET_IT = "no Chromium: apt-get install chromium (CONTRIBUTING.md)"

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(PROGRAM is None and os.environ.get("CI") != "true", reason=HOW_TO_GET_IT),
]

SCHEMES = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
WIDTHS = pytest.mark.parametrize("width", [390, 768, 1280])
STUDIES = pytest.mark.parametrize("name", ["written-before", "usual", "hostile", "empty"])

CONTRASTS = """
(() => {
  const parse = (text) => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    return { r, g, b, a };
  };
  const light = ({ r, g, b }) => {
    const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const [x, y, z] = [r, g, b].map((v) => linear(v / 255));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.a === 1) return colour;
    }
    return parse("rgb(255, 255, 255)");
  };
  const found = {};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.getClientRects().length) continue;
    if (element.closest("title, script")) continue;
    const style = getComputedStyle(element);
    const [a, b] = [light(parse(element.closest("svg") ? style.fill : style.color)), light(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found[walker.currentNode.data.trim().slice(0, 40)] = ratio;
  }
  return { low: found, scheme: getComputedStyle(document.body).backgroundColor };
})()
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Page]:
    assert PROGRAM is not None, HOW_TO_GET_IT
    with chromium(PROGRAM, tmp_path_factory.mktemp("browser")) as page:
        yield page
        assert page.complaints == []


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    studies = {
        "written-before": WRITTEN_BEFORE,
        "usual": usual(folder / "usual"),
        "hostile": hostile(folder / "hostile"),
        "empty": study_of([], folder / "empty"),
    }
    for name, study in studies.items():
        (folder / f"{name}.html").write_text(render_page(read_report(study)))
    return {name: folder / f"{name}.html" for name in studies}


@STUDIES
@WIDTHS
def test_it_fits_every_width_and_the_console_stays_silent(browser, pages, name, width):
    browser.show(pages[name], width=width)
    assert browser.run("[...document.querySelectorAll('section')].map(one => one.id)") == SECTIONS
    assert browser.run("document.documentElement.scrollWidth") <= width
    wide = browser.run(
        "[...document.querySelectorAll('body *:not(svg *)')]"
        f".filter(one => one.getBoundingClientRect().right > {width} + 1)"
        ".map(one => one.outerHTML.slice(0, 80))"
    )
    assert wide == []
    small = browser.run(
        "[...document.querySelectorAll('main *')]"
        ".filter(one => one.textContent.trim() && !one.closest('svg'))"
        ".filter(one => parseFloat(getComputedStyle(one).fontSize) < 12).length"
    )
    assert small == 0
    assert browser.complaints == []


@STUDIES
@SCHEMES
def test_every_word_stands_out(browser, pages, name, dark):
    browser.show(pages[name], width=1280, dark=dark)
    browser.run("document.querySelectorAll('details').forEach(one => one.open = true)")
    seen = browser.run(CONTRASTS)
    assert seen["low"] == {}
    assert (seen["scheme"] == "rgb(17, 20, 22)") == dark


def test_the_command_can_be_copied(browser, pages):
    browser.show(pages["usual"], width=1280)
    browser.run(
        "Object.defineProperty(navigator, 'clipboard', {value: {writeText: async t => window.copied = t}})"
    )
    browser.run("document.querySelector('button').click()")
    assert browser.run("document.querySelector('button').textContent") == "Copied"
    assert browser.run("window.copied").startswith(
        "python -m sglang.launch_server \\\n  --max-running-requests 2"
    )


def test_nothing_that_a_record_says_is_run(browser, pages):
    browser.show(pages["hostile"], width=1280)
    assert browser.run("document.scripts.length") == 1
    assert browser.run("document.images.length") == 0
    assert "<script>alert(1)</script>" in browser.run("document.body.innerText")

"""The catalogue's language: figures, conditions and texts; and nothing more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.diagnosis.expression import ExpressionError, UndefinedError, parse, parse_template


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3 // 5", 0),
        ("up(0.737, 2)", 0.74),
        ("up(0.74, 2)", 0.74),
        ("down(0.9 - 0.03, 2)", 0.87),
        ("gib(970, 'MiB')", 970 / 1024),
        ("mib(1.25, 'GiB')", 1280),
        ("min(4, slots) + max(1, 2)", 6),
        ("'big' if slots > 7 else 'small'", "big"),
        ("known(slots) and not known(other)", True),
        ("'Flash' in name", True),
        ("slots > 5 or other > 2", True),
    ],
)
def test_values(text, value):
    assert parse(text).value({"slots": 8, "name": "DFlash2"}) == value


@pytest.mark.parametrize(
    "text", ["other", "1 / 0", "'a' + 1", "gib(1, 'stone')", "up('x', 2)", "10 ** 9 // 1"]
)
def test_what_has_no_value_says_so_and_holds_not(text):
    if "**" in text:
        with pytest.raises(ExpressionError):
            parse(text)
        return
    with pytest.raises(UndefinedError):
        parse(text).value({})
    assert parse(text).holds({}) is False


@pytest.mark.parametrize(
    "text",
    [
        "open('x')",
        "().__class__",
        "slots.real",
        "[1]",
        "lambda: 1",
        "1 < 2 < 3",
        "f'{slots}'",
        "max(*slots)",
        "x := 1",
    ],
)
def test_other_python_is_refused(text):
    with pytest.raises(ExpressionError):
        parse(text)


def test_texts_show_figures_in_their_format():
    template = parse_template("{slots} ÷ {each} = {slots // each}, {share:.2f} of {name}")
    names = {"slots": 3, "each": 5, "share": 0.7363, "name": "card"}
    assert template.render(names) == "3 ÷ 5 = 0, 0.74 of card"
    with pytest.raises(UndefinedError):
        template.render({"slots": 3})


@given(st.text(max_size=80))
def test_any_text_is_an_expression_or_refused(text):
    try:
        parse(text).holds({"a": 1, "b": "x"})
    except ExpressionError:
        return

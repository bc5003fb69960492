from __future__ import annotations

import ast
import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.serving_env.patches.source import Replacement, Source, UnreadableSourceError


def renamed(raw: bytes, name: str, new: str) -> bytes:
    source = Source.of(raw)
    names = [node for node in ast.walk(source.tree) if isinstance(node, ast.Name) and node.id == name]
    return source.edited(Replacement(*source.span(node), new) for node in names)


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("before", "encoding", "bom"),
    [
        ("", "utf-8", b""),
        ("", "utf-8", codecs.BOM_UTF8),
        ("# -*- coding: latin-1 -*-\n", "latin-1", b""),
        ("# coding: cp1252\n", "cp1252", b""),
    ],
)
def test_only_the_named_places_change(line_end: str, before: str, encoding: str, bom: bytes) -> None:
    text = before + "s = 'é\x0cü'; old\nif s:\n\told = ('ö', old)  # ä\n"
    raw = bom + text.replace("\n", line_end).encode(encoding)
    wanted = bom + text.replace("old", "new_name").replace("\n", line_end).encode(encoding)
    assert renamed(raw, "old", "new_name") == wanted


@given(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30),
    st.booleans(),
    st.sampled_from(["\n", "\r\n"]),
)
def test_any_text_in_a_string_is_kept(inside: str, bom: bool, line_end: str) -> None:
    raw = (codecs.BOM_UTF8 if bom else b"") + f"a = {inside!r}; b{line_end}c = b{line_end}".encode()
    assert renamed(raw, "b", "longer") == raw.replace(b"; b", b"; longer").replace(b"c = b", b"c = longer")


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"# coding: nonsense\nx\n", "encoding"),
        (b"\xff\xfe bad", "encoding"),
        (b"def f(:\n", "not valid Python: line 1"),
        (b"x = 1\0\n", "null"),
    ],
)
def test_what_cannot_be_read_says_why(raw: bytes, reason: str) -> None:
    with pytest.raises(UnreadableSourceError, match=reason):
        _ = Source.of(raw).tree


def test_an_edit_that_breaks_the_code_is_refused() -> None:
    with pytest.raises(UnreadableSourceError, match="not valid Python"):
        renamed(b"old = 1\n", "old", "1 +")


def test_overlapping_edits_are_refused() -> None:
    source = Source.of(b"abcdef\n")
    with pytest.raises(UnreadableSourceError, match="same place"):
        source.edited([Replacement(0, 3, "x"), Replacement(2, 4, "y")])


def test_old_macintosh_line_ends_are_kept() -> None:
    assert renamed(b"a = 1\rold\rold.b\r", "old", "new") == b"a = 1\rnew\rnew.b\r"

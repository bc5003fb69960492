from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.serving_env.patches import syntax


def found(pattern: str, source: str, where: dict[str, str] | None = None) -> list[dict[str, str]]:
    matches = syntax.find(pattern, ast.parse(source), where)
    return [{name: ast.unparse(part) for name, part in match.parts.items()} for match in matches]


@pytest.mark.parametrize(
    ("pattern", "source", "parts"),
    [
        (
            "matmul($a, $b[:$n].T)",
            "y = matmul(\n  x . to(w),\n  self.w[ : rows ].T)",
            [{"a": "x.to(w)", "b": "self.w", "n": "rows"}],
        ),
        ("f(..., backend=$b)", 'f(1, 2, k=3, backend="x")', [{"b": "'x'"}]),
        ("f(..., backend=$b)", "f(1, 2)", []),
        ("f($a, backend=$b)", "f(1, other=2, backend=3)", []),
        ("$a + $a", "x + y; z.q + z.q", [{"a": "z.q"}]),
        ('$l[:, $n:] = float("-inf")', "logits[:, org:] = float('-inf')", [{"l": "logits", "n": "org"}]),
        ("$x.apply(...)", "a.apply(); b.apply(1, k=2)", [{"x": "a"}, {"x": "b"}]),
    ],
)
def test_finds_places_by_structure(pattern: str, source: str, parts: list[dict[str, str]]) -> None:
    assert found(pattern, source) == parts


def test_a_part_can_be_required_to_equal_a_source() -> None:
    source = 'f(backend="cublas"); f(backend="cudnn")'
    assert found("f(backend=$b)", source, {"b": '"cublas"'}) == [{"b": "'cublas'"}]


def test_definitions_are_found_in_classes_blocks_and_functions() -> None:
    module = ast.parse(
        "if a:\n    def one(): pass\ntry:\n    pass\nexcept E:\n    class C:\n        async def two(self):\n"
        "            def three(): pass\n"
    )
    names = {one.name for one in syntax.definitions(module)}
    assert names == {"one", "C.two", "C.two.three"}
    assert syntax.defined_names(module) == names | {"C"}
    assert [one.name for one in syntax.named(module, ["*.two"])] == ["C.two"]


@pytest.mark.parametrize("pattern", ["f(", "a; b", ""])
def test_a_pattern_that_is_not_one_thing_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        syntax.parse_pattern(pattern)


_EXPRESSIONS = st.recursive(
    st.sampled_from(["x", "self.w", "1", "'s'", "-y"]),
    lambda inner: st.one_of(
        st.builds("({} + {})".format, inner, inner),
        st.builds("f({}, k={})".format, inner, inner),
        st.builds("{}[0]".format, inner.map(lambda one: f"({one})")),
    ),
    max_leaves=6,
)


@given(_EXPRESSIONS)
def test_every_expression_fits_itself_and_a_bare_name(source: str) -> None:
    node = ast.parse(source, mode="eval").body
    assert any(match.node is node for match in syntax.find(source, node))
    assert any(match.node is node for match in syntax.find("$any", node))


@given(_EXPRESSIONS, _EXPRESSIONS)
def test_a_pattern_without_names_fits_only_what_parses_alike(pattern: str, source: str) -> None:
    node = ast.parse(source, mode="eval").body
    alike = ast.dump(ast.parse(pattern, mode="eval").body) == ast.dump(node)
    assert any(match.node is node for match in syntax.find(pattern, node)) == alike

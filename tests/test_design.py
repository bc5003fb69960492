"""The table in docs/design.md says who may import whom; the code keeps to it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dflash_deploy"
SHARED = {
    "errors",
    "files",
    "lock",
    "paths",
    "proxy",
    "resources",
    "yaml_file",
    "json_file",
    "catalogue",
    "__version__",
}


def rows() -> dict[str, str]:
    table = re.findall(
        r"^\| `dflash_deploy/(\w+)(?:/|\.py)` \|.*\| (.+) \|$",
        (ROOT / "docs" / "design.md").read_text(),
        re.MULTILINE,
    )
    return dict(table)


def allowed(name: str) -> set[str]:
    table = rows()
    below = set(list(table)[list(table).index(name) + 1 :])
    words = table[name].replace(",", "").split()
    if words[:2] == ["everything", "below"]:
        return below - set(words[3:])
    named = set(words) - {"-"}
    assert named <= below, f"{name} may not import what stands above it: {named - below}"
    return named


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("dflash_deploy"):
            parts = node.module.split(".")
            yield from parts[1:2] or [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("dflash_deploy."))


def test_every_part_of_the_package_stands_in_the_table() -> None:
    parts = {
        path.stem
        for path in PACKAGE.iterdir()
        if not path.name.startswith(("_", ".")) and path.name != "py.typed"
    }
    assert parts - SHARED == set(rows())


@pytest.mark.parametrize("name", sorted(rows()))
def test_imports_go_down(name: str) -> None:
    folder = PACKAGE / name
    files = folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]
    wrong = {
        f"{path.relative_to(ROOT)} imports {other}"
        for path in files
        for other in imported(path)
        if other != name and other not in SHARED | allowed(name)
    }
    assert not wrong

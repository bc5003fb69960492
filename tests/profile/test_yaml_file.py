from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from dflash_deploy import yaml_file
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.yaml_file import InvalidDocument, Origin


def _mistakes(text: str | bytes) -> list[str]:
    with pytest.raises(InvalidDocument) as caught:
        yaml_file.parse(text, "f.yaml")
    assert caught.value.exit_code == ExitCode.INVALID_INPUT
    return [str(problem) for problem in caught.value.problems]


def test_values_and_where_they_are_written() -> None:
    document = yaml_file.parse("a: 1\nb:\n  c: [x, 2.5, null]\n  d: yes\n", "f.yaml")
    assert document.value == {"a": 1, "b": {"c": ["x", 2.5, None], "d": True}}
    assert document.origin(("b", "c")) == Origin("f.yaml", 3, 3)
    assert document.origin(("b", "c", 1)) == Origin("f.yaml", 3, 10)
    assert document.origin(("b", "missing", "deeper")) == Origin("f.yaml", 2, 1)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.001", 0.001),
        ("1.0e-3", 0.001),
        ("1.", 1.0),
        ("-7", -7),
        ("0E0", "0E0"),
        ("1e-3", "1e-3"),
        ("-.5", "-.5"),
        ("012", "012"),
        ("089", "089"),
        ("1_000", "1_000"),
        ("999999999999999999", 999999999999999999),
        ("0.5.23", "0.5.23"),
        ("2026-01-01", "2026-01-01"),
        ("12:30:00", "12:30:00"),
        ("0x10", "0x10"),
        ("'12'", "12"),
        ("~", None),
        ("off", False),
        ("|\n  12", "12"),
    ],
)
def test_plain_values(text: str, value: object) -> None:
    read = yaml_file.parse(f"key: {text}", "f").value
    assert read == {"key": value}
    assert type(read["key"]) is type(value)


def test_keys_are_text_whatever_they_look_like() -> None:
    assert yaml_file.parse("{on: 1, 8: 2, null: 3}", "f").value == {"on": 1, "8": 2, "null": 3}


def test_every_key_that_is_given_twice_is_told() -> None:
    assert _mistakes("a: 1\nb: {c: 1, c: {d: 2}}\na: [3]\n") == [
        "f.yaml:2:11: b.c: given twice; the first is in line 2",
        "f.yaml:3:1: a: given twice; the first is in line 1",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: .nan", "f.yaml:1:4: a: expected a finite number, found .nan"),
        ("a: -.inf", "f.yaml:1:4: a: expected a finite number, found -.inf"),
        ("a: 1.0e+999", "f.yaml:1:4: a: expected a finite number, found 1.0e+999"),
        ("a: 1" + "0" * 18, "f.yaml:1:4: a: expected a number of at most 18 digits"),
        ("a: -" + "9" * 5000, "f.yaml:1:4: a: expected a number of at most 18 digits"),
        ("a: !!python/object/apply:os.system [id]", "f.yaml:1:4: a: tags"),
        ("a: &x [1]\nb: *x", "f.yaml:2:4: b: aliases"),
        ("a: 1\n---\nb: 2", "f.yaml:2:1: expected one document, found another"),
        ("[1, 2]: 3", "expected a key of plain text"),
        ("? {a: 1}\n: 3", "expected a key of plain text"),
        ('"\\e[31m": 3', "a key holds control characters"),
        ('a: "x\\0y"', "f.yaml:1:4: a: holds a NUL or half a character"),
        ("a: [1\nb: 2", "f.yaml:2:2: not YAML"),
        ("a: b: c", "f.yaml:1:5: not YAML"),
        ("\tx: 1", "f.yaml:1:1: not YAML"),
        (b"a: 1\nb: \xff\xfe", "f.yaml:2:4: expected UTF-8 text"),
        (b"a: \x00", "f.yaml"),
        ("[" * 100_000, "nest"),
        ("- " * 40 + "x", "nested deeper than 32 levels"),
        ("[" + "1," * 30_000 + "]", "more than 20000 values"),
        ("#" * (yaml_file.MAX_BYTES + 1), "larger than 1024 KiB"),
    ],
)
def test_hostile_and_wrong_content(text: str | bytes, expected: str) -> None:
    (mistake,) = _mistakes(text)
    assert expected in mistake


def test_a_bomb_of_aliases_is_refused_before_it_grows() -> None:
    levels = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)]
    assert "aliases" in _mistakes("\n".join(levels))[0]


def test_an_empty_file_holds_nothing() -> None:
    assert yaml_file.parse("", "f").value is None
    assert yaml_file.parse("# only a comment\n", "f").value is None


def test_byte_order_mark_is_no_part_of_the_text() -> None:
    assert yaml_file.parse(b"\xef\xbb\xbfa: 1", "f").value == {"a": 1}


@given(st.binary(max_size=400))
@example(b"\xef\xbb\xbf")
@example(b"%YAML 9.9\n---\na")
@example(b"? a\n? b")
@example(b"!<tag:yaml.org,2002:str> a")
def test_any_bytes_give_a_value_or_an_error_for_people(data: bytes) -> None:
    try:
        document = yaml_file.parse(data, "f")
    except InvalidDocument as error:
        assert error.problems
        assert error.message
    else:
        assert isinstance(document.value, dict | list | str | int | float | None)


_number_like = st.from_regex(r"[-+]?[0-9._eE+-]{1,6}", fullmatch=True)
_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**15), 10**15)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
    | _number_like,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.from_regex(r"[a-z]{1,6}", fullmatch=True), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(_values)
@example(["0E0"])
@example(["-.5", "089", "1.5e5"])
@example([1e20, 1e-5])
def test_what_pyyaml_writes_is_read_as_it_was(value: object) -> None:
    try:
        read = yaml_file.parse(yaml.safe_dump(value), "f")
    except InvalidDocument as error:
        # PyYAML writes a NUL and half characters that no command line can hold, and explicit tags.
        assert any(word in error.message for word in ("NUL", "tags", "control"))
    else:
        assert read.value == value


@given(st.text(max_size=12) | _number_like)
def test_text_that_is_said_to_be_plain_is_read_as_text(text: str) -> None:
    plain = yaml_file.is_plain_text(text)
    if plain and re.fullmatch(r"[0-9A-Za-z][0-9A-Za-z.+_-]*", text):
        assert yaml_file.parse(f"key: {text}", "f").value == {"key": text}


class TestFiles:
    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(DeployError, match="no such file") as caught:
            yaml_file.read(tmp_path / "none.yaml")
        assert caught.value.exit_code == ExitCode.MISSING

    def test_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(DeployError, match="cannot be read") as caught:
            yaml_file.read(tmp_path)
        assert caught.value.exit_code == ExitCode.INVALID_INPUT

    def test_a_fifo_that_nobody_writes_does_not_hang(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo.yaml")
        with pytest.raises(DeployError, match="no regular file"):
            yaml_file.read(tmp_path / "fifo.yaml")

    @pytest.mark.parametrize("device", ["/dev/zero", "/dev/null"])
    def test_a_device(self, device: str) -> None:
        with pytest.raises(DeployError, match="no regular file"):
            yaml_file.read(Path(device))

    def test_one_that_may_not_be_read(self, tmp_path: Path) -> None:
        path = tmp_path / "secret.yaml"
        path.write_text("a: 1")
        path.chmod(0)
        if os.geteuid() == 0:
            # Root reads everything; ask as somebody else.
            tmp_path.chmod(0o755)
            script = (
                "import os, sys, pathlib; from dflash_deploy import yaml_file\n"
                "from dflash_deploy.errors import DeployError\n"
                "os.setuid(65534)\n"
                "try: yaml_file.read(pathlib.Path(sys.argv[1]))\n"
                "except DeployError as error: print(int(error.exit_code), error.message)"
            )
            run = subprocess.run(
                [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
            )
            said = run.stdout
        else:
            with pytest.raises(DeployError) as caught:
                yaml_file.read(path)
            said = f"{int(caught.value.exit_code)} {caught.value.message}"
        assert said.startswith(f"{int(ExitCode.INVALID_INPUT)} ")
        assert "Permission denied" in said

    def test_a_name_no_file_can_have(self) -> None:
        with pytest.raises(DeployError, match="cannot be read"):
            yaml_file.read(Path("a\0b.yaml"))

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dflash_deploy.deploy import escape
from dflash_deploy.errors import DeployError, ExitCode

from . import systemd_syntax as systemd

_HOSTILE = st.text(alphabet=" \t%$\\\"';#{}&|<>*?=~-@:+!nu0xé漢🙂")
_TEXT = st.one_of(_HOSTILE, st.text()).filter(lambda text: not escape_refuses(text))
_NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True)


def escape_refuses(text: str) -> bool:
    return any(
        ord(letter) < 0x20
        or 0x7F <= ord(letter) <= 0x9F
        or 0xD800 <= ord(letter) <= 0xDFFF
        or 0xFDD0 <= ord(letter) <= 0xFDEF
        or ord(letter) & 0xFFFE == 0xFFFE
        for letter in text
    )


@given(st.lists(_TEXT))
@example(
    [
        "",
        ";",
        " ; ",
        "a;b",
        "%n",
        "%%",
        "$HOME",
        "${HOME}",
        "$$",
        "\\",
        "\\\\n",
        '"',
        "'",
        " ",
        "#",
        "--x=",
        "-",
    ]
)
def test_a_command_is_read_back_as_it_was(arguments: list[str]):
    unit = f"[Service]\nExecStart={escape.command_line('/bin/x', arguments)}\nNext=1\n"
    read = systemd.settings(unit)
    assert read["Next"] == ["1"]
    assert systemd.command(read["ExecStart"][0]) == ["/bin/x", *arguments]


@given(_NAMES, _TEXT)
def test_a_variable_is_read_back_as_it_was(name: str, value: str):
    unit = f"[Service]\nEnvironment={escape.environment_assignment(name, value)}\nNext=1\n"
    read = systemd.settings(unit)
    assert read["Next"] == ["1"]
    (word,) = systemd.words(read["Environment"][0])
    assert systemd.specifiers_expanded(word) == f"{name}={value}"


@given(st.text())
def test_no_text_is_written_that_would_be_read_otherwise(text: str):
    """Either it is refused with a clear error, or it comes back the same."""
    if escape_refuses(text):
        with pytest.raises(DeployError):
            escape.command_word(text)
    else:
        assert systemd.command(f"/bin/x {escape.command_word(text)}") == ["/bin/x", text]


@given(st.text())
def test_a_comment_never_leaves_its_line(text: str):
    unit = f"# {escape.comment(text)}\nNext=1\n"
    assert unit.encode().splitlines()[-1] == b"Next=1"
    assert systemd.settings(unit) == {"Next": ["1"]}
    assert unit.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    "text", ["a\nb", "a\0b", "\x1b[0m", "tab\there", "\x7f", "\x9b31m", "\udc80", "\ufffe"]
)
def test_what_a_unit_cannot_carry_is_refused_by_name(text: str):
    for refused in (
        lambda: escape.command_word(text),
        lambda: escape.environment_assignment("NAME", text),
        lambda: escape.executable(f"/bin/{text}"),
        lambda: escape.setting_path(f"/etc/{text}"),
    ):
        with pytest.raises(DeployError) as caught:
            refused()
        assert caught.value.exit_code is ExitCode.INVALID_INPUT
        assert caught.value.fix
        assert text not in caught.value.message or text == "\udc80"


def test_an_argument_longer_than_the_kernel_takes_is_refused():
    assert escape.command_word("x" * (128 * 1024 - 1))
    with pytest.raises(DeployError, match="131072 bytes"):
        escape.command_word("x" * (128 * 1024))


@pytest.mark.parametrize(
    "path", ["python", "./python", "/opt/env/bin/", "", '/a"b', "/a'b", "/a\\b", "/a$b", "-/x"]
)
def test_a_program_that_systemd_could_not_start_is_refused(path: str):
    with pytest.raises(DeployError):
        escape.executable(path)


def test_a_programs_path_keeps_blanks_percent_signs_and_unicode():
    assert systemd.command(escape.executable("/opt/my env/50%/é/python")) == ["/opt/my env/50%/é/python"]


@pytest.mark.parametrize("name", ["", "1A", "A B", "A=B", "É"])
def test_a_variables_name_is_checked(name: str):
    with pytest.raises(DeployError):
        escape.environment_assignment(name, "x")

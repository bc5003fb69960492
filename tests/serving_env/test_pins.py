from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dflash_deploy import catalogue
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.serving_env.pins import DEFAULT_PIN, KIND, load_pin, pin_of_name, pin_of_source

COMMIT = "1cf2b8c000000000000000000000000000000000"


def write(folder: Path, **lines: str) -> Path:
    path = folder / "mine.yaml"
    given = {"id": "mine", "summary": "x", **lines}
    path.write_text("".join(f"{key}: {value}\n" for key, value in given.items()))
    return path


def test_shipped():
    pins = {pin_id: load_pin(pin_id) for pin_id in catalogue.files(KIND)}
    assert {"sglang-0.5.23", "sglang-0.5.19"} <= set(pins)
    assert load_pin(DEFAULT_PIN).requirements() == ["sglang==0.5.23", "torch==2.14.1"]
    assert pins["sglang-0.5.19"].requirements() == ["sglang==0.5.19", "torch==2.13.0"]
    assert all(pin.python == "3.11" and pin.kind == "version" for pin in pins.values())


def test_sources(tmp_path):
    git = pin_of_source("git", f"https://github.com/sgl-project/sglang.git@{COMMIT}")
    (wanted,) = git.requirements()
    assert wanted == f"git+https://github.com/sgl-project/sglang.git@{COMMIT}#subdirectory=python"
    wheel = pin_of_source("wheel", str(tmp_path / "sglang-0.5.23-cp311-cp311-linux_x86_64.whl"))
    assert wheel.requirements() == [f"sglang @ {Path(str(wheel.wheel)).as_uri()}"]
    address = f"https://example.org/sglang-0.5.23-py3-none-any.whl#sha256={'a' * 64}"
    assert pin_of_source("wheel", address).requirements() == [f"sglang @ {address}"]
    assert pin_of_source("path", "/opt/conda/envs/sglang").kind == "path"


@pytest.mark.parametrize(
    ("kind", "source", "fix"),
    [
        ("version", "", "--version 0.5.23"),
        ("version", "../../x", "--version 0.5.23"),
        ("wheel", "sglang.zip", "--wheel FILE.whl"),
        ("git", "https://github.com/sgl-project/sglang@main", "all 40 digits"),
        ("git", "main", "--git https://"),
    ],
)
def test_a_source_that_is_none_is_told_with_what_one_looks_like(kind, source, fix):
    with pytest.raises(DeployError) as caught:
        pin_of_source(kind, source)
    assert fix in str(caught.value.fix)
    assert f"--{kind}" in caught.value.message
    assert "pattern" not in caught.value.message


def test_a_persons_own_takes_the_place_of_a_shipped_one():
    from dflash_deploy import paths

    folder = paths.config_dir() / "engines"
    folder.mkdir(parents=True)
    (folder / "sglang-0.5.19.yaml").write_text("id: sglang-0.5.19\nsummary: mine\nversion: 0.5.19.post1\n")
    assert load_pin("sglang-0.5.19").source == "sglang==0.5.19.post1"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ({}, "give exactly one of version, wheel, git and path; found none"),
        ({"version": "0.5.23", "path": "/x"}, "found version, path"),
        ({"version": "'0.5.23; rm -rf /'"}, "version"),
        ({"version": "'>=0.5'"}, "version"),
        ({"wheel": "notes.txt"}, "a .whl file"),
        ({"wheel": "ftp://x/y.whl"}, "a .whl file"),
        ({"wheel": "http://x/sglang-1-py3-none-any.whl"}, "add #sha256="),
        ({"git": "https://x/y"}, "git and commit belong together"),
        ({"git": "https://x/y", "commit": "main"}, "expected all 40 digits of a commit, found 'main'"),
        ({"git": "--upload-pack=evil", "commit": COMMIT}, "git: expected https://"),
        ({"git": "https://x/y", "commit": COMMIT, "subdirectory": "../.."}, "subdirectory"),
        ({"version": "0.5.23", "beside": "['--index-url=http://evil']"}, "expected name==version"),
        ({"version": "0.5.23", "beside": "[torch]"}, "expected name==version"),
        ({"version": "0.5.23", "find_links": "['--pre']"}, "expected a folder or an address"),
        ({"version": "0.5.23", "extra_index_urls": "['-r x']"}, "expected an address"),
        ({"version": "0.5.23", "verzion": "1"}, "unknown key"),
        ({"version": "0.5.23", "python": "'3.11; x'"}, "expected a version of Python such as 3.11"),
    ],
)
def test_wrong_files(lines, message, tmp_path):
    with pytest.raises(DeployError) as caught:
        load_pin(str(write(tmp_path, **lines)))
    assert caught.value.exit_code is ExitCode.INVALID_INPUT
    assert message in caught.value.message
    assert "mine.yaml:" in caught.value.message


@pytest.mark.parametrize(
    "lines",
    [
        {"version": "0.5.23", "extra_index_urls": "['https://me:s3cret@example.org/simple']"},
        {"version": "0.5.23", "extra_index_urls": "['ftp://me:s3cret@example.org/simple']"},
        {"version": "0.5.23", "extra_index_urls": "['https://example.org/simple?token=s3cret']"},
        {"version": "0.5.23", "find_links": "['https://s3cret@example.org/wheels']"},
        {"wheel": "https://me:s3cret@example.org/sglang-1-py3-none-any.whl"},
        {"wheel": "https://example.org/get?token=s3cret/sglang-1-py3-none-any.whl"},
        {"git": "https://s3cret@example.org/sglang.git", "commit": COMMIT},
        {"git": "ssh://git:s3cret@example.org/sglang.git", "commit": COMMIT},
    ],
)
def test_a_password_is_refused_and_not_repeated(lines, tmp_path):
    with pytest.raises(DeployError) as caught:
        load_pin(str(write(tmp_path, **lines)))
    assert "~/.netrc" in caught.value.message
    assert "s3cret" not in caught.value.message + str(caught.value.fix)


def test_a_user_of_ssh_is_no_secret():
    git = pin_of_source("git", f"ssh://git@github.com/sgl-project/sglang.git@{COMMIT}")
    assert git.git == "ssh://git@github.com/sgl-project/sglang.git"


def test_unknown():
    with pytest.raises(DeployError, match="did you mean") as caught:
        load_pin("sglang-0.5.32")
    assert caught.value.exit_code is ExitCode.MISSING


@given(st.sampled_from(["version", "wheel", "git", "path"]), st.text(max_size=80))
@example("path", "~nobody-of-that-name")
@example("wheel", "~nobody-of-that-name/sglang-1-py3-none-any.whl")
@example("wheel", "https://[/sglang-1-py3-none-any.whl")
def test_any_source_is_a_pin_or_a_message(kind, source):
    try:
        pin = pin_of_source(kind, source)
    except DeployError as error:
        assert error.message
    else:
        assert not any(one.startswith("-") for one in pin.requirements())


@pytest.mark.parametrize(
    ("name", "requirements"),
    [
        ("sglang-0.5.19", ["sglang==0.5.19", "torch==2.13.0"]),
        ("sglang-0.5.19-patched", ["sglang==0.5.19", "torch==2.13.0"]),
        ("sglang-0.5.22", ["sglang==0.5.22"]),
        ("sglang-0.5.22.post1_try", ["sglang==0.5.22.post1"]),
        ("sglang-0.5.22.", ["sglang==0.5.22"]),
        ("sglang-0.5.23rc1.old", ["sglang==0.5.23rc1"]),
        ("sglang-2", ["sglang==0.5.23", "torch==2.14.1"]),
        ("main", ["sglang==0.5.23", "torch==2.14.1"]),
        (None, ["sglang==0.5.23", "torch==2.14.1"]),
    ],
)
def test_a_name_that_begins_with_a_release_is_made_from_that_one(name, requirements):
    assert pin_of_name(name).requirements() == requirements

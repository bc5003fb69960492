"""Commands in every form that people paste them in."""

from __future__ import annotations

import shlex
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_deploy.engine.sglang.flags import FlagTable
from dflash_deploy.engine.sglang.pasted.command import PastedCommand, read_text, read_words
from dflash_deploy.errors import DeployError, ExitCode

TARGET = "RadixArk/Qwen3.8-27B-NVFP4"
DRAFT = "incoai/Qwen3.8-27B-DFlash2"


def pasted(text: str, **options: object) -> PastedCommand:
    return read_text(textwrap.dedent(text), source="the paste", **options)  # type: ignore[arg-type]


def test_a_plain_command_line():
    command = read_words(
        [
            "python",
            "-m",
            "sglang.launch_server",
            "--model-path",
            TARGET,
            "--mem-fraction-static=0.85",
            "--tp",
            "1",
        ]
    )
    assert command.flags == {"model-path": TARGET, "mem-fraction-static": 0.85, "tp-size": 1}
    assert (command.version, command.version_from) == ("0.5.23", "newest")
    assert [problem.kind for problem in command.problems] == ["abbreviated"]


@pytest.mark.parametrize(
    "front",
    [
        "python3 -m sglang.launch_server",
        "/opt/venv/bin/python -msglang.launch_server",
        "sglang serve",
        "/opt/venv/bin/sglang serve",
        "CUDA_VISIBLE_DEVICES=0 python -m sglang.launch_server",
        "env A=b CUDA_VISIBLE_DEVICES=0 sglang serve",
        "exec nohup sglang serve",
        "sudo -E env PATH=/bin sglang serve",
        "conda run -n serve python -m sglang.launch_server",
        "uv run --with 'sglang[all]' python -m sglang.launch_server",
        "numactl --cpunodebind=0 python -m sglang.launch_server",
        "docker run --gpus all -e HF_TOKEN=x -p 1:1 lmsysorg/sglang:latest python3 -m sglang.launch_server",
        "docker run --rm -it --shm-size 32g lmsysorg/sglang:latest",
        "cd /srv && source venv/bin/activate && sglang serve",
        "python /opt/sglang/python/sglang/launch_server.py",
    ],
)
def test_what_may_stand_in_front(front: str):
    command = pasted(f"{front} --model-path {TARGET} --max-running-requests 2\n")
    assert command.flags == {"model-path": TARGET, "max-running-requests": 2}


@pytest.mark.parametrize(
    "tail", [" &", " > server.log 2>&1 &", " 2>&1 | tee log", "; echo done", " < /dev/null"]
)
def test_what_may_stand_behind(tail: str):
    command = pasted(f"sglang serve --model-path {TARGET} --port 30000{tail}")
    assert command.argv == ("--model-path", TARGET, "--port", "30000")
    assert command.notes == ()


def test_a_script_with_variables_arrays_and_comments():
    command = pasted(
        f"""\
        #!/usr/bin/env bash
        set -euo pipefail
        # sglang serve --model-path other/model
        MODEL={TARGET}
        export CUDA_VISIBLE_DEVICES=0 PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"
        FRACTION=${{FRACTION:-0.85}}; USERS="${{USERS:=1}}"
        ARGS=(
          --mem-fraction-static "$FRACTION"   # leave room
          # --enable-torch-compile
          --cuda-graph-bs-decode 1 2
        )
        ARGS+=(--served-model-name "one two")
        EXTRA="--kv-cache-dtype fp8_e4m3"
        python -m sglang.launch_server \\
          --model-path "$MODEL" \\
          "${{ARGS[@]}}" $EXTRA --max-running-requests $USERS \\
          --context-length 8k --max-total-tokens 8Ki
        """
    )
    assert command.flags == {
        "model-path": TARGET,
        "mem-fraction-static": 0.85,
        "cuda-graph-bs-decode": (1, 2),
        "served-model-name": "one two",
        "kv-cache-dtype": "fp8_e4m3",
        "max-running-requests": 1,
        "context-length": 8000,
        "max-total-tokens": 8192,
    }
    assert command.env["CUDA_VISIBLE_DEVICES"] == "0"
    assert command.env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "MODEL" not in command.env
    assert (command.problems, command.notes) == ((), ())


def test_what_only_the_shell_knows_is_named_and_the_rest_is_read():
    command = pasted(
        f"""\
        sglang serve --model-path "$MODELS/{TARGET}" --mem-fraction-static $(cat fraction) \\
          --port `free_port` --max-running-requests "$N" $EXTRA --max-mamba-cache-size 4
        """
    )
    assert command.flags == {"model-path": f"$MODELS/{TARGET}", "max-mamba-cache-size": 4}
    said = "\n".join(command.notes)
    for unknown in ("$MODELS", "$(cat fraction)", "`free_port`", "$N", "$EXTRA"):
        assert unknown in said


def test_nothing_is_run(tmp_path: Path):
    trace = tmp_path / "trace"
    pasted(
        f"X=$(touch {trace}); `touch {trace}`\n"
        f"sglang serve --model-path $(touch {trace}) --port ${{Y:-$(touch {trace})}}"
    )
    assert not trace.exists()


def test_a_setting_under_a_condition_is_told():
    command = pasted(
        """\
        FRACTION=0.9
        if [ -n "$SMALL" ]; then
          FRACTION=0.8
        fi
        [ -n "$DEBUG" ] && ARGS=(--log-level debug)
        sglang serve --model-path m/m --mem-fraction-static $FRACTION
        """
    )
    assert command.flags["mem-fraction-static"] == 0.9
    assert any("line 3 sets FRACTION only under a condition" in note for note in command.notes)


def test_text_that_was_mangled_on_the_way_is_read_as_meant():
    command = pasted(
        "```bash\r\n(venv) me@box:~/serve$ sglang serve \u2013model-path \u201cm/m\u201d \\\r\n"
        ">   \u2014mem-fraction-static 0.85 \\ \r\n>   \u2013\u2013port\u00a030000 \\  # the port\r\n"
        "  --max-running-requests 2\r\n```\r\n"
    )
    assert command.flags == {
        "model-path": "m/m",
        "mem-fraction-static": 0.85,
        "port": 30000,
        "max-running-requests": 2,
    }
    said = "\n".join(command.notes)
    for word in ("dashes", "quotes", "blanks", "follows the backslash"):
        assert word in said


def test_a_missing_backslash_or_a_comment_between_is_told():
    command = pasted(
        """\
        $ sglang serve --model-path m/m \\
            # --enable-torch-compile \\
            --port 30000
            --max-running-requests 2
        """
    )
    assert command.flags == {"model-path": "m/m", "port": 30000, "max-running-requests": 2}
    assert any("line 3 begins with --port" in note for note in command.notes)
    assert any("line 4 begins with --max-running-requests" in note for note in command.notes)


def test_a_command_inside_a_shell_inside_a_container():
    command = pasted(
        """\
        docker run --gpus '"device=1"' --env CUDA_MODULE_LOADING=LAZY lmsysorg/sglang:v0.5.19-cu130 \\
          bash -lc "pip list && exec sglang serve --model-path m/m --cuda-graph-max-bs 4"
        """
    )
    assert command.flags == {"model-path": "m/m", "cuda-graph-max-bs-decode": 4}
    assert command.env["CUDA_MODULE_LOADING"] == "LAZY"
    assert (command.version, command.version_from) == ("0.5.19", "text")
    assert [problem.kind for problem in command.problems] == ["deprecated"]


def test_a_script_that_writes_the_script():
    command = pasted(
        """\
        cat > start.sh <<'EOF'
        exec sglang serve --model-path m/m --port 30000
        EOF
        chmod +x start.sh
        """
    )
    assert command.flags == {"model-path": "m/m", "port": 30000}


def test_of_several_commands_the_first_is_taken():
    command = pasted(
        "sglang serve --model-path a/a\nsglang serve --model-path b/b\necho sglang serve --model-path c/c\n"
    )
    assert command.flags == {"model-path": "a/a"}
    assert "2 commands start SGLang here (lines 1, 2)" in command.notes[0]


COMPOSE = """\
x-common: &common
  image: lmsysorg/sglang:v0.5.21-cu130
  environment:
    CUDA_VISIBLE_DEVICES: 0
    HF_TOKEN: ${HF_TOKEN}
services:
  proxy:
    image: nginx
    command: ["nginx", "-g", "daemon off;"]
  sglang:
    <<: *common
    %s
"""


@pytest.mark.parametrize(
    "command",
    [
        "command: python3 -m sglang.launch_server --model-path ${MODEL:-m/m} --mem-fraction-static 0.90",
        "command: >\n      sglang serve\n      --model-path m/m\n      --mem-fraction-static 0.90",
        'command: ["sglang", "serve", "--model-path", "m/m", "--mem-fraction-static", "0.90"]',
        "entrypoint: python3 -m sglang.launch_server\n    command:\n      - --model-path\n      - m/m\n"
        "      - --mem-fraction-static\n      - 0.90",
        "command: --model-path m/m --mem-fraction-static 0.90",
        "command:\n      - bash\n      - -c\n      - |\n        sglang serve --model-path m/m \\\n"
        "          --mem-fraction-static 0.90",
    ],
)
def test_a_compose_file(command: str):
    read = pasted(COMPOSE % command)
    assert read.flags == {"model-path": "m/m", "mem-fraction-static": 0.9}
    assert read.env["CUDA_VISIBLE_DEVICES"] == "0"
    assert (read.version, read.version_from) == ("0.5.21", "text")
    assert "HF_TOKEN" not in repr(read)


def test_a_kubernetes_manifest():
    command = pasted(
        """\
        apiVersion: v1
        kind: Service
        metadata: {name: sglang}
        ---
        apiVersion: apps/v1
        kind: Deployment
        spec:
          template:
            spec:
              containers:
                - name: sglang
                  image: docker.io/lmsysorg/sglang:v0.5.22
                  env:
                    - {name: FRACTION, value: "0.8"}
                  command: [python3, -m, sglang.launch_server]
                  args: [--model-path, m/m, --mem-fraction-static, $(FRACTION), --tp-size, "1"]
        """
    )
    assert command.flags == {"model-path": "m/m", "mem-fraction-static": 0.8, "tp-size": 1}
    assert command.version == "0.5.22"


def test_a_unit_file():
    command = pasted(
        """\
        # /etc/systemd/system/sglang.service
        [Unit]
        Description=sglang serve --model-path no/no
        [Service]
        Environment="MODEL=m/m" FRACTION=0.85 'EXTRA=--max-running-requests 2'
        EnvironmentFile=-/etc/sglang.env
        ExecStartPre=/bin/sleep 1
        ExecStart=
        ExecStart=-/opt/venv/bin/python -m sglang.launch_server --model-path ${MODEL} \\
            --mem-fraction-static ${FRACTION} \\
            # a comment between
            $EXTRA --port ${PORT} \\
            --served-model-name "a b 100%% $$5"
        Restart=always
        """
    )
    assert command.flags == {
        "model-path": "m/m",
        "mem-fraction-static": 0.85,
        "max-running-requests": 2,
        "served-model-name": "a b 100% $5",
    }
    said = "\n".join(command.notes)
    assert "EnvironmentFile" in said
    assert "${PORT}" in said


def test_a_shipped_unit_reads_back():
    text = (Path(__file__).parents[2] / "systemd" / "dflash-sglang-rtx5090.service").read_text()
    command = read_text(text, source="the unit")
    assert command.flags["model-path"] == TARGET
    assert command.flags["speculative-algorithm"] == "DFLASH"
    assert not [problem for problem in command.problems if not problem.warning]


def test_a_config_file_is_merged_beneath_the_command(tmp_path: Path):
    (tmp_path / "engine.yaml").write_text(
        "model-path: m/m\nmem-fraction-static: 0.8\ndisable-radix-cache: true\nenable-metrics: false\n"
        "context-length: 8Ki\nmem_fraction: 1\napi-key: hush\n"
    )
    command = read_text(
        "sglang serve --config engine.yaml --mem-fraction-static 0.9", source="x", folder=tmp_path
    )
    assert command.flags == {
        "model-path": "m/m",
        "mem-fraction-static": 0.9,
        "disable-radix-cache": True,
        "context-length": 8192,
        "config": "engine.yaml",
        "api-key": "***",
    }
    assert any("mem_fraction" in problem.flag for problem in command.problems)
    gone = read_text("sglang serve --model-path m/m --config gone.yaml", source="x", folder=tmp_path)
    assert any("gone.yaml cannot be read" in note for note in gone.notes)
    alone = read_text((tmp_path / "engine.yaml").read_text(), source="engine.yaml")
    assert alone.flags["context-length"] == 8192


def test_the_graph_configuration_says_the_same_as_its_flags():
    config = '{"decode": {"backend": "full", "bs": [1, 2]}, "prefill": {"backend": "disabled"}}'
    command = read_words(["sglang", "serve", "--model-path", "m/m", "--cuda-graph-config", config])
    assert command.flags["cuda-graph-bs-decode"] == (1, 2)
    assert command.flags["cuda-graph-backend-prefill"] == "disabled"


def test_a_key_is_blotted_out():
    for text in ("--api-key sk-123", "--api-key=sk-123"):
        command = pasted(f"sglang serve --model-path m/m {text}")
        assert "sk-123" not in repr(command)
        assert command.flags["api-key"] == "***"


def test_names_of_other_releases_are_read_as_meant_and_told():
    text = "sglang serve --model-path m/m --cuda-graph-max-bs 4 --mamba-scheduler-strategy no_buffer"
    old = pasted(text, version="0.5.19")
    new = pasted(text, version="0.5.23")
    assert old.flags == new.flags
    assert new.flags["cuda-graph-max-bs-decode"] == 4
    assert {problem.kind for problem in old.problems} == {"deprecated"}
    assert [problem.kind for problem in new.problems if not problem.warning] == ["ambiguous", "removed"]


LOG = (
    "[2026-08-24 13:31:10] server_args={'model_path': 'm/m', 'mem_fraction_static': 0.85, 'api_key': 'hush', "
    "'device': <object at 0x7f>, 'max_running_requests': 48, 'disable_radix_cache': True, "
    "'speculative_algorithm': 'DFLASH', 'cuda_graph_config': {'decode': {'backend': 'full', 'bs': [1, 2]}}, "
    "'served_model_name': \"it's, (fine\", 'cuda_graph_bs_decode': [1, 2], 'context_length': None}"
)


OLD_LOG = (
    "INFO server_args=ServerArgs(model_path='m/m', mem_fraction_static=0.85, api_key='hush', device=<x>, "
    'max_running_requests=48, disable_radix_cache=True, served_model_name="it\'s, (fine", '
    "cuda_graph_bs_decode=[1, 2], context_length=None)"
)


@pytest.mark.parametrize("line", [LOG, OLD_LOG])
def test_the_settings_that_a_log_tells(line: str):
    command = read_text(f"noise\nserver_args={{'model_path': 'old/old'}}\n{line}\nmore\n", source="x")
    assert command.flags["model-path"] == "m/m"
    assert command.flags["mem-fraction-static"] == 0.85
    assert command.flags["max-running-requests"] == 48
    assert command.flags["disable-radix-cache"] is True
    assert command.flags["served-model-name"] == "it's, (fine"
    assert command.flags["cuda-graph-bs-decode"] == (1, 2)
    assert "context-length" not in command.flags
    assert "hush" not in repr(command)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "python train.py --model-path x",
        "pkill -f 'sglang serve'",
        "services:\n  a:\n    command: [b]\n",
    ],
)
def test_text_without_a_launch_is_refused(text: str):
    with pytest.raises(DeployError) as refused:
        read_text(text, source="the paste")
    assert refused.value.exit_code is ExitCode.INVALID_INPUT
    assert refused.value.fix


GROWING = "A=" + "x" * 1000 + "\n" + "A=$A$A\n" * 40 + "sglang serve --model-path $A\n"
LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + at)}: &{chr(98 + at)} [*{chr(97 + at)}, *{chr(97 + at)}]\n" for at in range(20)
)
MERGES = "a: &a {k: v}\n" + "".join(
    f"{chr(98 + at)}: &{chr(98 + at)} {{<<: [*{chr(97 + at)}, *{chr(97 + at)}]}}\n" for at in range(20)
)


@pytest.mark.parametrize(
    "text",
    [
        GROWING,
        f"services:\n{textwrap.indent(LAUGHS, '  ')}",
        f"services:\n{textwrap.indent(MERGES, '  ')}",
        "services: " + "[" * 5000,
        "services: &a [*a]",
        "server_args={'a': " + "[" * 50_000,
        "sglang serve " + "$(" * 50_000,
        "sglang serve " + '"${A:-' * 20_000,
        "sglang serve " + "'\"" * 50_000,
        "[Service]\nEnvironment=A=" + "b" * 50_000 + "\nExecStart=sglang serve " + "${A}" * 20_000,
        "x" * (1 << 19),
    ],
)
def test_hostile_text_ends_in_an_error_or_in_a_reading(text: str):
    try:
        read_text(text, source="the paste")
    except DeployError as error:
        assert len(error.message) < 2000


FRAGMENTS = st.sampled_from(
    [
        *"'\"`$(){}[]\\#;&|<>=\n\t \u2013\u201c%",
        "sglang serve ",
        "--model-path m/m ",
        "--mem-fraction-static ",
        "$A",
        "${A:-",
        "A=(",
        "A+=(",
        "<<EOF\n",
        "EOF\n",
        "[Service]\n",
        "ExecStart=",
        "Environment=",
        "services:\n",
        "  command: ",
        "  - ",
        "&a ",
        "*a ",
        "<<: ",
        "server_args={",
        "'a': ",
        "if x; then ",
        "fi\n",
        "\\\n",
    ]
)


@given(st.lists(FRAGMENTS | st.text(max_size=5), max_size=40).map("".join))
@settings(max_examples=300)
def test_no_text_breaks_the_reader(text: str):
    for read in (lambda: read_text(text, source="x"), lambda: read_words(["sglang", "serve", text])):
        try:
            command = read()
        except DeployError:
            continue
        assert all(isinstance(word, str) for word in command.argv)


VALUES = st.text(st.characters(exclude_categories=["C", "Z", "P"]), min_size=1, max_size=20)
FLAGS = st.fixed_dictionaries(
    {"model-path": VALUES},
    optional={
        "mem-fraction-static": st.integers(1, 99).map(lambda percent: percent / 100),
        "max-running-requests": st.integers(1, 64),
        "served-model-name": st.text(
            st.sampled_from("ab '\"$\\`#*~;&|<>(){}=%!"), min_size=1, max_size=12
        ).filter(lambda text: not text.startswith("-")),
        "disable-radix-cache": st.just(True),
        "cuda-graph-bs-decode": st.lists(st.integers(1, 64), min_size=1, max_size=4).map(tuple),
        "kv-cache-dtype": st.sampled_from(["auto", "fp8_e4m3", "bfloat16"]),
        "max-total-tokens": st.integers(1, 1 << 20),
    },
)


@given(FLAGS)
@settings(max_examples=150)
def test_flags_that_are_written_as_a_command_read_back(flags: dict[str, object]):
    argv = FlagTable.for_version("0.5.23").spell(flags)  # type: ignore[arg-type]
    words = ["/opt/venv/bin/python", "-m", "sglang.launch_server", *argv]
    assert read_words(words).flags == flags
    assert read_text(shlex.join(words), source="x").flags == flags


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            'FROM lmsysorg/sglang:v0.5.22\nCMD ["sglang", "serve", "--model-path", "m/m", "--port", "1"]',
            "0.5.22",
        ),
        (
            'subprocess.Popen(["python", "-m", "sglang.launch_server", "--model", "m/m", "--port", "1"])',
            None,
        ),
        ('launch_server_cmd(\n    "python3 -m sglang.launch_server --model-path m/m --port 1"\n)', None),
        ('{"args": ["--model-path", "m/m", "--port", "1"], "module": "sglang.launch_server"}', None),
        ("**Command:** `sglang serve --model-path m/m --port 1`\n\nsglang: 0.5.21\n", "0.5.21"),
        ("- `--model-path m/m`\n- `--port 1`\n", None),
        (
            "image:\n  repository: x/sglang\n  tag: v0.5.22\nargs:\n  - --model-path=m/m\n  - --port=1\n",
            "0.5.22",
        ),
    ],
)
def test_a_command_within_other_text(text: str, version: str | None):
    command = pasted(text)
    assert command.flags == {"model-path": "m/m", "port": 1}
    assert (command.version, command.version_from) == ((version, "text") if version else ("0.5.23", "newest"))


@pytest.mark.parametrize(
    "text",
    [
        "MODEL ?= m/m\nserve:\n\tsglang serve --model-path $(MODEL)\n",
        "set -gx MODEL m/m\nsglang serve --model-path $MODEL\n",
        "set MODEL=m/m\r\nsglang serve --model-path $MODEL\r\n",
        '$MODEL = "m/m"\nsglang serve `\n  --model-path $MODEL\n',
        '$env:MODEL = "m/m"\nsglang serve --model-path $MODEL\n',
    ],
)
def test_variables_of_other_shells_and_of_make(text: str):
    assert pasted(text).flags == {"model-path": "m/m"}


def test_options_of_the_shell_itself_set_no_variables():
    command = pasted("set -e -o pipefail\nset -- one two\nsglang serve --model-path ${pipefail:-m/m}\n")
    assert command.flags == {"model-path": "m/m"}


def test_serve_takes_its_model_without_the_flag():
    command = pasted("sglang serve m/m --port 1")
    assert command.flags == {"model-path": "m/m", "port": 1}
    assert command.problems == ()


def test_flags_with_underscores_are_planned_and_told():
    for text in (
        "sglang serve --model_path m/m --mem_fraction_static 0.8",
        "model_path: m/m\nmem_fraction_static: 0.8",
    ):
        command = pasted(text)
        assert command.flags == {"model-path": "m/m", "mem-fraction-static": 0.8}
        assert {"--model_path", "--mem_fraction_static"} <= {one.flag for one in command.problems}

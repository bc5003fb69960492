"""A folder with an interpreter and a small package called sglang stands for an installation."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from dflash_deploy.engine.sglang.installed import inspect
from dflash_deploy.errors import DeployError, ExitCode

SERVER_ARGS = """
    import argparse, sys

    class DeprecatedAliasStoreAction(argparse.Action):
        def __init__(self, option_strings, dest, new_flag=None, **kwargs):
            self.new_flag = new_flag
            super().__init__(option_strings, dest, **kwargs)

        def __call__(self, parser, namespace, values, option_string=None):
            setattr(namespace, self.dest, values)

    def human_readable_int(text):
        return int(text)

    class ServerArgs:
        @staticmethod
        def add_cli_args(parser):
            print("INFO importing things, not ended by a line break", end="")
            print("warning", file=sys.stderr)
            parser.add_argument("--model-path", "--model", type=str, required=True)
            parser.add_argument("--host", type=str, default="127.0.0.1")
            parser.add_argument("--context-length", type=human_readable_int)
            parser.add_argument("--brand-new-switch", action="store_true")
            parser.add_argument("--kv-cache-dtype", choices=["auto", "fp9"], default="auto")
            parser.add_argument("--graph-bs", type=int, nargs="+")
            parser.add_argument("--fold", action=argparse.BooleanOptionalAction, default=True)
            parser.add_argument(
                "--old-bs", type=int, nargs="+", dest="graph_bs", action=DeprecatedAliasStoreAction,
                new_flag="--graph-bs",
            )
"""


class Environment:
    """A virtual environment in small: an interpreter, and packages beside it."""

    def __init__(self, root: Path) -> None:
        self.python = root / "bin" / "python"
        self.packages = root / "lib" / "python3.11" / "site-packages"
        self.count = root / "asked"
        self.python.parent.mkdir(parents=True)
        self.packages.mkdir(parents=True)
        self.python.write_text(
            f'#!/bin/sh\necho >> "{self.count}"\nPYTHONPATH="{self.packages}" exec "{sys.executable}" "$@"\n'
        )
        self.python.chmod(0o755)

    def install(self, server_args: str = SERVER_ARGS, version: str = "0.5.23") -> None:
        package = self.packages / "sglang" / "srt"
        package.mkdir(parents=True, exist_ok=True)
        for folder in (package.parent, package):
            (folder / "__init__.py").touch()
        (package / "server_args.py").write_text(textwrap.dedent(server_args))
        for old in self.packages.glob("sglang-*.dist-info"):
            (old / "METADATA").unlink()
            old.rmdir()
        metadata = self.packages / f"sglang-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")

    @property
    def asked(self) -> int:
        return len(self.count.read_text().splitlines()) if self.count.exists() else 0


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "venv")


def test_its_own_parser_is_asked(environment: Environment) -> None:
    environment.install()
    found = inspect(environment.python)
    assert found.version == "0.5.23"
    assert found.flag_table.note is None
    assert found.flag_table.spell(
        {"brand-new-switch": True, "context-length": "8Ki", "old-bs": (1, 2), "fold": False}
    ) == ("--brand-new-switch", "--context-length", "8Ki", "--graph-bs", "1", "2", "--no-fold")
    with pytest.raises(DeployError, match="kv-cache-dtype: 'fp8' is not one of auto, fp9"):
        found.flag_table.spell({"kv-cache-dtype": "fp8"})
    assert found.flag_table.find("page-size") is None


def test_the_answer_is_kept_until_another_version_comes(environment: Environment) -> None:
    environment.install()
    assert inspect(environment.python) == inspect(environment.python)
    assert environment.asked == 1
    environment.install(version="0.5.24")
    assert inspect(environment.python).version == "0.5.24"
    assert environment.asked == 2


def test_modules_that_only_the_servers_own_variables_lead_to(
    environment: Environment, tmp_path: Path
) -> None:
    """Asked without them, the parser could not be imported, and the shipped table would take its place."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    (stubs / "kernels_of_a_card.py").touch()
    needs = "import os, sys\nsys.path.append(os.environ.get('MORE', ''))\nimport kernels_of_a_card\n"
    environment.install(needs + textwrap.dedent(SERVER_ARGS))
    assert inspect(environment.python).flag_table.note is not None
    for _ in range(2):
        found = inspect(environment.python, env={"MORE": str(stubs)})
        assert found.flag_table.note is None
        assert found.flag_table.find("brand-new-switch") is not None
    assert environment.asked == 2


def test_a_spoilt_answer_is_asked_for_again(environment: Environment) -> None:
    environment.install()
    inspect(environment.python)
    for kept in Path(os.environ["XDG_CACHE_HOME"]).rglob("*.json"):
        kept.write_text("{")
    assert inspect(environment.python).version == "0.5.23"
    assert environment.asked == 2


def test_no_sglang(environment: Environment) -> None:
    with pytest.raises(DeployError) as caught:
        inspect(environment.python)
    assert caught.value.exit_code is ExitCode.MISSING
    assert caught.value.fix is not None
    assert "pip install sglang==" in caught.value.fix


def test_no_interpreter(tmp_path: Path) -> None:
    for path in (tmp_path / "python", tmp_path):
        with pytest.raises(DeployError) as caught:
            inspect(path)
        assert caught.value.exit_code is ExitCode.MISSING


def test_an_sglang_that_does_not_import_gets_the_shipped_table(environment: Environment) -> None:
    environment.install("import no_such_kernel_package\n", version="0.5.19")
    found = inspect(environment.python)
    assert found.version == "0.5.19"
    assert found.flag_table.find("cuda-graph-max-bs") is not None
    assert found.flag_table.note is not None
    assert "no_such_kernel_package" in found.flag_table.note


def test_an_import_that_hangs_is_ended(environment: Environment, tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    environment.install(
        f"import os, time\nopen({str(marker)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    with pytest.raises(DeployError, match="did not say within"):
        inspect(environment.python, timeout_s=5)
    if marker.exists():  # a busy machine may not have come so far
        with pytest.raises(ProcessLookupError):
            os.kill(int(marker.read_text()), signal.SIGCONT)


@pytest.mark.parametrize(
    "report",
    [
        "{}",
        "[",
        json.dumps({"version": 5}),
        json.dumps({"version": "0.5.23", "options": [{"names": []}]}),
        json.dumps({"version": "x" * 1000}),
    ],
)
def test_an_answer_of_another_shape_is_refused(environment: Environment, report: str) -> None:
    environment.python.write_text(f"#!/bin/sh\necho 'DFLASH-DEPLOY-SGLANG {report}'\n")
    with pytest.raises(DeployError, match="does not say which SGLang it has"):
        inspect(environment.python)

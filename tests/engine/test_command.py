from __future__ import annotations

from pathlib import Path

import pytest

from dflash_deploy.engine.sglang.command import launch_argv, speculation_flags
from dflash_deploy.engine.sglang.flags import FlagTable
from dflash_deploy.errors import DeployError, ExitCode

TABLE = FlagTable.for_version("0.5.23")


def test_the_whole_command() -> None:
    argv = launch_argv(
        Path("/opt/venv/bin/python"),
        {"model-path": "/m", "port": 1, **speculation_flags("dflash", "/d")},
        host="127.0.0.1",
        port=30000,
        table=TABLE,
    )
    assert argv[:3] == ("/opt/venv/bin/python", "-m", "sglang.launch_server")
    read = TABLE.parser().parse_args(argv[3:])
    assert (read.host, read.port, read.model_path) == ("127.0.0.1", 30000, "/m")
    assert (read.speculative_algorithm, read.speculative_draft_model_path) == ("DFLASH", "/d")


def test_a_flag_that_does_not_exist_is_found_before_the_start() -> None:
    with pytest.raises(DeployError, match="mem-fraction-static"):
        launch_argv(Path("python"), {"mem-fraction-statik": 1}, host="::1", port=1, table=TABLE)


@pytest.mark.parametrize(
    ("method", "draft", "algorithm", "with_draft"),
    [
        ("ngram", None, "NGRAM", False),
        ("mtp", "/ignored", "NEXTN", False),
        ("dspark", None, "DSPARK", False),
        ("dspark", "/d", "DSPARK", True),
        ("dflash", "/d", "DFLASH", True),
    ],
)
def test_ways_to_draft(method: str, draft: str | None, algorithm: str, with_draft: bool) -> None:
    flags = speculation_flags(method, draft)  # type: ignore[arg-type]
    assert flags["speculative-algorithm"] == algorithm
    assert ("speculative-draft-model-path" in flags) is with_draft


def test_no_speculation_takes_no_flags() -> None:
    assert speculation_flags("none", "/d") == {}


def test_dflash_without_a_draft_is_refused() -> None:
    with pytest.raises(DeployError) as caught:
        speculation_flags("dflash")
    assert caught.value.exit_code is ExitCode.INVALID_INPUT

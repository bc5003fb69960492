"""What is asked often, or only to be told that there is nothing, loads little."""

import subprocess
import sys

import pytest

HEAVY = {"asyncio", "httpx", "jinja2", "numpy", "optuna", "rich", "sqlalchemy"}
"""Each a tenth of a second or more; the health check of a service is started every minute."""


@pytest.mark.parametrize(
    ("code", "more"),
    [
        (
            "import sys; from dflash_deploy.cli import main; sys.argv[1:] = ['--help']; main()",
            {"pydantic", "yaml"},
        ),
        (
            "import dflash_deploy.doctor.examination, dflash_deploy.watch.status\n"
            "import dflash_deploy.watch.health.examination, dflash_deploy.deploy.timer\n"
            "import sys; from dflash_deploy.cli import main; sys.argv[1:] = ['health', 'no-such']; main()",
            set(),
        ),
    ],
    ids=["help", "doctor, status, health"],
)
def test_heavy_libraries_are_not_loaded(code: str, more: set[str]):
    command = [
        sys.executable,
        "-c",
        f"import atexit, sys; atexit.register(lambda: print(*sys.modules))\n{code}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "dflash_deploy.cli" in loaded, done.stderr
    assert not loaded & (HEAVY | more)

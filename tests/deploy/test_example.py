"""``systemd/`` holds what the code renders for the write-up's RTX 5090.

Render it again with ``PYTHONPATH=tests python -m deploy.test_example`` from the top of the repository.
"""

from __future__ import annotations

from pathlib import Path

from dflash_deploy.deploy.configuration import PYTHON_PLACE
from dflash_deploy.deploy.unit import UnitSpec, render_unit
from dflash_deploy.engine.sglang.command import launch_argv
from dflash_deploy.engine.sglang.flags import FlagTable
from dflash_deploy.profile.load import load_profile
from dflash_deploy.tune.launching import model_flags, values

EXAMPLE = Path(__file__).parents[2] / "systemd" / "dflash-sglang-rtx5090.service"


def rendered() -> str:
    profile = load_profile("rtx5090-single-user")
    known = profile.known[0]
    argv = launch_argv(
        PYTHON_PLACE,
        values({**model_flags(profile, simulated=False), **profile.flags, **known.flags}),
        host=profile.service.host,
        port=profile.service.port,
        table=FlagTable.for_version(profile.engine.version),
    )
    return render_unit(
        UnitSpec(
            service="rtx5090",
            argv=argv,
            host=profile.service.host,
            port=profile.service.port,
            env=profile.env,
            comments=(
                "An example, as `dflash-deploy emit` writes it.",
                f"Profile rtx5090-single-user, setting {known.name!r}: {known.source}.",
                "Tune on your own card before you rely on it:",
                "  dflash-deploy tune --profile rtx5090-single-user",
            ),
        )
    )


def test_the_example_is_what_the_code_renders():
    assert EXAMPLE.read_text() == rendered()


if __name__ == "__main__":
    EXAMPLE.write_text(rendered())

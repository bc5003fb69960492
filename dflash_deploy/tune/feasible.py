"""What is refused before a launch: minutes are saved on a configuration that cannot serve."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_deploy.profile.schema import Profile
from dflash_deploy.tune.records import Predicted
from dflash_deploy.tune.space import Settings


@dataclass(frozen=True)
class Forecast:
    """What is known of a configuration before its launch. Figures are predicted.

    Attributes:
        refusal: why it is not worth a launch, or None.
        predicted: the plan's figures, None where the plan knows nothing of the card or the model.
    """

    refusal: str | None = None
    predicted: Predicted | None = None


def forecast(profile: Profile, flags: Settings) -> Forecast:
    """Judge a configuration by what is certain, without launching it."""
    users = profile.workload.users
    running = flags.get("max-running-requests")
    if isinstance(running, int) and running < users:
        return Forecast(f"max-running-requests {running} is below the {users} users")
    return Forecast()

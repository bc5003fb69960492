"""Making a service's next generation out of a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_deploy import __version__
from dflash_deploy.deploy.below import hub_home
from dflash_deploy.deploy.gate import reached_at
from dflash_deploy.deploy.generations import Generation
from dflash_deploy.deploy.unit import UnitSpec, render_unit
from dflash_deploy.deploy.versions import Versions, read_versions

if TYPE_CHECKING:
    from dflash_deploy.deploy.configuration import Configuration


@dataclass(frozen=True)
class Recipe:
    """Everything of a generation but its number."""

    configuration: Configuration
    spec: UnitSpec

    def make(self, number: int) -> tuple[Generation, str, str | None]:
        """The generation of this number, its unit, and the evidence for it.

        Raises:
            DeployError: something cannot stand in a unit.
        """
        spec, chosen = self.spec, self.configuration
        unit = render_unit(spec)
        generation = Generation(
            service=spec.service,
            number=number,
            created=datetime.now(UTC),
            tool_version=__version__,
            manager=spec.manager,
            source=chosen.source,
            simulated=chosen.simulated,
            flags=chosen.flags,
            argv=spec.argv,
            env=dict(spec.env),
            host=spec.host,
            health_host=reached_at(spec.host),
            port=spec.port,
            user=spec.user,
            api_key_file=spec.api_key_file,
            versions=self._versions(),
            vram_expected_mib=chosen.vram_expected_mib,
            notify=chosen.profile.service.notify,
            unit_sha256=sha256(unit.encode()).hexdigest(),
        )
        evidence = chosen.trial.model_dump_json(indent=2) + "\n" if chosen.trial else None
        return generation, unit, evidence

    def _versions(self) -> Versions:
        hub = hub_home(self.spec.manager, self.spec.service, self.spec.env)
        return read_versions(Path(self.spec.argv[0]), self.configuration.flags, hub=hub)

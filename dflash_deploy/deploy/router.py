"""The router in front of several engines: SGLang's own (``smg``), configured for a few cards of one machine.

What SGLang's page names for several engines is the Shepherd Model Gateway, ``smg`` on PyPI; ``sglang-router``
is what it was called before.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Literal

from dflash_deploy import __version__
from dflash_deploy.deploy import escape, gate
from dflash_deploy.deploy.generations import Generation
from dflash_deploy.deploy.unit import UNIT_PREFIX, UnitSpec, checked, template
from dflash_deploy.deploy.versions import Versions
from dflash_deploy.profile.schema import Notify

_MONTH_S = 30 * 86_400


@dataclass(frozen=True)
class RouterSpec:
    """What a router's unit is rendered from.

    Attributes:
        service: the router's own name as a service.
        python: interpreter of the environment that has it.
        version: of the router.
        engines: address by name of each engine's service.
        host: address that it listens on.
        port: that it listens on; its own metrics are on ``metrics_port`` of the loopback address.
        api_key_file: of the engines; clients of the router need the same key.
    """

    service: str
    python: Path
    version: str
    engines: dict[str, str]
    host: str
    port: int
    metrics_port: int
    manager: Literal["system", "user"] = "system"
    user: str | None = None
    api_key_file: str | None = None
    notify: Notify | None = None

    @property
    def argv(self) -> tuple[str, ...]:
        """The router's whole command, without a key."""
        options: dict[str, object] = {
            "host": self.host,
            "port": self.port,
            # The engine that has a prompt's beginning in its cache, unless it has more to do than the others.
            "policy": "cache_aware",
            "balance-abs-threshold": 0,
            "balance-rel-threshold": 1.0,
            # An engine answers its health check after a token, and says itself after 20 s that none came.
            "health-check-interval-secs": 5,
            "health-check-timeout-secs": 25,
            "health-failure-threshold": 2,
            "health-success-threshold": 1,
            # A request that found an engine gone is given to another one.
            "retry-max-retries": 3,
            "cb-failure-threshold": 3,
            "cb-timeout-duration-secs": 10,
            # However late an engine starts, it is taken in.
            "worker-startup-timeout-secs": _MONTH_S,
            "worker-startup-check-interval": 2,
            "request-timeout-secs": 3600,
            "shutdown-grace-period-secs": 60,
            "prometheus-host": "127.0.0.1",
            "prometheus-port": self.metrics_port,
            # At "info" it writes two lines a request.
            "log-level": "warn",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        urls = ["--worker-urls", *self.engines.values(), "--disable-tokenizer-autoload"]
        return (str(self.python), "-m", "smg.launch_router", *words, *urls)

    def make(self, number: int) -> tuple[Generation, str, str | None]:
        """The generation of this number and its unit.

        Raises:
            DeployError: something cannot stand in a unit, or it would serve other machines without a key.
        """
        unit = render_router(self)
        generation = Generation(
            service=self.service,
            number=number,
            created=datetime.now(UTC),
            tool_version=__version__,
            manager=self.manager,
            source=f"router smg {self.version} in front of {', '.join(self.engines)}",
            simulated=False,
            flags={},
            argv=self.argv,
            env={},
            host=self.host,
            health_host=gate.reached_at(self.host),
            port=self.port,
            user=self.user,
            api_key_file=self.api_key_file,
            versions=Versions(),
            role="router",
            notify=self.notify,
            unit_sha256=sha256(unit.encode()).hexdigest(),
        )
        return generation, unit, None


def render_router(spec: RouterSpec) -> str:
    """Write the unit.

    Raises:
        DeployError: as ``RouterSpec.make``.
    """
    checked(
        UnitSpec(
            spec.service,
            spec.argv,
            spec.host,
            spec.port,
            manager=spec.manager,
            user=spec.user,
            api_key_file=spec.api_key_file,
        )
    )
    python = spec.argv[0]
    argv = gate.router_with_key(spec.argv) if spec.api_key_file else spec.argv
    _, *arguments = gate.past_proxies(argv, spec.host)
    return template("dflash-sglang-router.service.j2").render(
        name=f"{UNIT_PREFIX}{spec.service}",
        comments=(f"dflash-deploy {__version__}: router smg {spec.version}",),
        engines=[f"{UNIT_PREFIX}{name}.service" for name in spec.engines],
        system=spec.manager == "system",
        user=spec.user,
        api_key_file=spec.api_key_file,
        command=escape.command_line(python, arguments),
        port_check=gate.port_check(python, spec.host, spec.port),
        ready_wait=gate.ready_wait(python, spec.host, spec.port, "/readiness"),
    )

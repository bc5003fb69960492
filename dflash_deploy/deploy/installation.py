"""What an installation is made of: one engine or one for each card, and a router in front of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_deploy import paths
from dflash_deploy.deploy import access, configuration, fleet, key_file, models
from dflash_deploy.deploy import service as services
from dflash_deploy.deploy.configuration import Configuration
from dflash_deploy.deploy.generations import SYSTEM_ROOT, Generation, Manager, root_of
from dflash_deploy.deploy.recipe import Recipe
from dflash_deploy.deploy.router import RouterSpec
from dflash_deploy.deploy.seal import Seal, seal_of
from dflash_deploy.deploy.service import Changed, Service, Tell
from dflash_deploy.deploy.unit import WRITTEN_FOR_SYSTEMD
from dflash_deploy.engine.launch import Launch
from dflash_deploy.engine.sglang.flags import FlagTable
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.machine.gpu import read_gpus
from dflash_deploy.serving_env import router as router_env
from dflash_deploy.serving_env.patches.choices import VARIABLE, bmm_choices

Make = Callable[[int], tuple[Generation, str, str | None]]


@dataclass(frozen=True)
class Wanted:
    """What a person asked for.

    Attributes:
        python: interpreter of the engine's environment.
        run_as: account, None for the profile's, or for one that systemd makes.
        name: of the service, None for the profile's.
        systemd_version: None where it is not known.
        gpus: the cards of ``--gpus``, None for one engine with whatever cards it sees.
    """

    configuration: Configuration
    python: Path
    manager: Manager
    run_as: str | None
    name: str | None
    systemd_version: int | None
    gpus: str | None

    @property
    def service(self) -> str:
        """Name of the service, or of the fleet."""
        return self.name or self.configuration.profile.service.name

    @property
    def user(self) -> str | None:
        """The account, None for one that systemd makes, or for one's own manager."""
        return (self.run_as or self.configuration.profile.service.user) if self.manager == "system" else None


@dataclass(frozen=True)
class Step:
    """One service to install."""

    service: str
    port: int
    make: Make


def engines(wanted: Wanted, *, behind: bool, tell: Tell) -> list[Step]:
    """The engines to install; nothing is changed yet.

    Args:
        wanted: what was asked for.
        behind: a router will stand in front of them.
        tell: told what a person should know.

    Raises:
        DeployError: something of it cannot be.
    """
    seal = seal_of(wanted.python)
    chosen = wanted.configuration
    backend = chosen.profile.env.get(VARIABLE)
    if backend is not None:
        # Measured where the environment was patched; elsewhere the service would silently take another.
        bmm_choices(wanted.python).require(backend)
    if seal.version != chosen.engine_version:
        tell(
            f"note: {chosen.source} is for SGLang {chosen.engine_version}, and {wanted.python} has "
            f"{seal.version}: tune again to know what it does there"
        )
    chosen = _readable(wanted, seal, tell)
    if wanted.gpus is None:
        return [_step(wanted, chosen, wanted.service, seal)]
    seats = fleet.seats(wanted.gpus, read_gpus())
    first = chosen.profile.service.port + behind
    found = []
    for place, seat in enumerate(seats):
        one = fleet.on_one_card(chosen, wanted.service, seat, first + place, behind=behind)
        found.append(_step(wanted, one, one.profile.service.name, seal))
    return found


def router(wanted: Wanted, steps: Sequence[Step], python: Path | None, *, dry_run: bool, tell: Tell) -> Step:
    """The router in front of these engines, its environment made where it is not there.

    Raises:
        DeployError: it cannot be had.
    """
    service = wanted.configuration.profile.service
    if python is None and not dry_run:
        root = SYSTEM_ROOT.parent if wanted.manager == "system" else paths.data_dir()
        python = router_env.make(root, say=tell)
    if python is None:
        tell(f"would make an environment with smg {router_env.VERSION}")
        python, version = Path("/the/routers/environment/bin/python"), router_env.VERSION
    else:
        python = python.absolute()
        if not python.exists():
            raise DeployError(
                f"--router-python {python} is not there",
                fix="leave it out: an environment is then made for the router",
                exit_code=ExitCode.MISSING,
            )
        version = router_env.version_of(python)
        if wanted.manager == "system":
            access.require(access.account(wanted.user), "the router's environment", python.parents[1])
    name = f"{wanted.service}-router"
    spec = RouterSpec(
        name,
        python,
        version,
        {step.service: Launch((), "127.0.0.1", step.port).base_url for step in steps},
        service.host,
        service.port,
        metrics_port=max(step.port for step in steps) + 1,
        manager=wanted.manager,
        user=wanted.user,
        api_key_file=str(service.api_key_file) if service.api_key_file else None,
        notify=service.notify,
    )
    return Step(name, service.port, spec.make)


def left_over(wanted: Wanted, steps: Sequence[Step]) -> tuple[str, ...]:
    """Services of an earlier installation under this name that are not part of this one."""
    now = [step.service for step in steps]
    before = fleet.members(root_of(wanted.manager), wanted.service)
    alone = [wanted.service] if (root_of(wanted.manager) / wanted.service).is_dir() else []
    return tuple(one for one in (*alone, *before) if one not in now)


def install(
    steps: Sequence[Step],
    service_of: Callable[[str], Service],
    do: Callable[[Service, Make], Changed],
) -> list[tuple[Service, Changed]]:
    """Install one after the other; when one does not serve, those before it go back as well.

    What had no generation before stays: it serves, and nothing is there to go back to.
    """
    done: list[tuple[Service, Changed]] = []
    before: list[int | None] = []
    for step in steps:
        service = service_of(step.service)
        before.append(service.store.current())
        done.append((service, do(service, step.make)))
        problem = done[-1][1].problem
        if problem is None:
            continue
        for place, (earlier, _changed) in enumerate(done[:-1]):
            number = before[place]
            if number is not None:
                back = services.rollback(earlier, number)
                why = f"taken back, since {service.store.service} does not serve with the new one"
                done[place] = (earlier, replace(back, problem=back.problem or why))
        break
    return done


def _step(wanted: Wanted, chosen: Configuration, name: str, seal: Seal) -> Step:
    # A flag is spelled as the SGLang that is installed wants it.
    spec = configuration.unit_spec(
        chosen,
        python=wanted.python,
        manager=wanted.manager,
        user=wanted.run_as,
        name=name,
        table=FlagTable.for_version(seal.version),
        seal=seal,
    )
    made = Recipe(chosen, replace(spec, systemd_version=wanted.systemd_version or WRITTEN_FOR_SYSTEMD))
    return Step(name, spec.port, made.make)


def _readable(wanted: Wanted, seal: Seal, tell: Tell) -> Configuration:
    """The configuration with models that are here already, when its account may read all that it needs."""
    chosen = wanted.configuration
    who = access.account(wanted.user) if wanted.manager == "system" else None
    if who is not None:
        prefix, real = wanted.python.parents[1], wanted.python.resolve()
        files = [wanted.python, real, Path(seal.site_packages)]
        access.require(who, "SGLang's environment", prefix, files=files)
    found = models.local(chosen.flags, chosen.profile.env, who)
    for note in found.notes:
        tell(f"note: {note}")
    models.require(found.flags, who)
    if (key := chosen.profile.service.api_key_file) is not None:
        key_file.require(key)
    return replace(chosen, flags=found.flags)

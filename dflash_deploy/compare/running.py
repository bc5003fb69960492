"""A comparison from its first launch to its last: begun anew, gone on with, or cut short."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from dflash_deploy import __version__
from dflash_deploy.bench.endpoint import Endpoint, discover
from dflash_deploy.bench.protocols import Options, Protocol
from dflash_deploy.bench.quality.exam import Examination, agreement, faults_beside
from dflash_deploy.bench.record import quality_of, workload_of
from dflash_deploy.bench.results import ResultFile, Run
from dflash_deploy.bench.standalone import examined_run, measured_run
from dflash_deploy.compare.here import look_here, machine_here
from dflash_deploy.compare.methods import arm_of
from dflash_deploy.compare.records import (
    ArmRecord,
    ComparisonRecord,
    RunRecord,
    claim,
    read_run,
    run_path,
    write_record,
)
from dflash_deploy.engine.sglang.command import Method
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import hold_room
from dflash_deploy.machine.cards import load_card
from dflash_deploy.profile.load import find as find_profile
from dflash_deploy.profile.load import load_profile
from dflash_deploy.profile.schema import Profile
from dflash_deploy.server.outcome import NotServed
from dflash_deploy.server.ports import free_port
from dflash_deploy.server.process import Server
from dflash_deploy.serving_env.current import default_python
from dflash_deploy.tune.launching import Simulated, values
from dflash_deploy.tune.opening import Place, card_here, real_rig, simulated_rig
from dflash_deploy.tune.signals import Asked
from dflash_deploy.tune.study import Rig, alone_on
from dflash_deploy.tune.trial import degradation

PLAIN: Method = "none"
_OPTIONS = Options(salt="compare")
"""Every server is fresh, so nothing is cached; and all are asked the very same questions."""

_LONGEST_REASON = 2000

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Wanted:
    """What a person asked for; None where the profile says.

    Attributes:
        overrides: ``key=value`` settings on top of the profile.
        drafts: draft models by method.
        rounds: of each launch that count.
        repeats: launches of each method.
        examine: ask questions besides the load.
    """

    profile: str
    methods: tuple[Method, ...]
    overrides: Sequence[str] = ()
    drafts: Mapping[Method, str] | None = None
    simulate: Simulated | None = None
    users: int | None = None
    output_tokens: int | None = None
    rounds: int | None = None
    repeats: int = 1
    examine: bool = True
    name: str | None = None


def begin(wanted: Wanted, place: Place) -> tuple[Path, ComparisonRecord, Rig]:
    """Make a comparison, with everything checked that can be before a launch.

    Raises:
        DeployError: the profile, a method, the card or the engine is wrong; nothing has been launched.
    """
    profile = load_profile(wanted.profile, overrides=wanted.overrides)
    simulated = wanted.simulate is not None
    if not simulated:
        python = place.python.expanduser().absolute() if place.python else None
        engine = profile.engine.model_copy(
            update={"python": python or profile.engine.python or default_python()}
        )
        profile = profile.model_copy(update={"engine": engine})
    rig = _rig(profile, wanted.simulate, place)
    arms = [arm_of(profile, method, wanted.drafts or {}, simulated=simulated) for method in wanted.methods]
    for arm in arms:
        rig.launcher.table.spell(values(arm.flags))
    protocol = _protocol(
        profile,
        users=wanted.users or profile.workload.users,
        output_tokens=wanted.output_tokens or profile.workload.output_tokens,
        rounds=wanted.rounds or profile.measure.rounds,
    )
    record = ComparisonRecord(
        name=wanted.name or "",
        created=datetime.now(UTC),
        tool_version=__version__,
        simulated=simulated,
        card=load_card(wanted.simulate.card).id if wanted.simulate else card_here(profile),
        seed=wanted.simulate.seed if wanted.simulate else 0,
        time_scale=wanted.simulate.time_scale if wanted.simulate else 1.0,
        engine_version=rig.launcher.table.version,
        profile=profile,
        arms=[ArmRecord(method=arm.method, flags=dict(arm.flags)) for arm in arms],
        repeats=wanted.repeats,
        users=protocol.users[0],
        output_tokens=protocol.output_tokens,
        rounds=protocol.rounds,
        examine=wanted.examine,
        machine=machine_here(wanted.simulate.card if wanted.simulate else None),
        workload=workload_of(protocol, _OPTIONS),
    )
    folder = claim(wanted.name, find_profile(wanted.profile).stem)
    record = record.model_copy(update={"name": folder.name})
    try:
        write_record(folder / "comparison.json", record)
    except BaseException:
        # Its name is taken by nothing, but for what somebody killed left there.
        with suppress(OSError):
            folder.rmdir()
        raise
    return folder, record, rig


def rig_again(record: ComparisonRecord, place: Place) -> Rig:
    """What a comparison that is gone on with runs on.

    Raises:
        DeployError: its engine is gone.
    """
    simulated = Simulated(record.card or "", record.seed, record.time_scale) if record.simulated else None
    return _rig(record.profile, simulated, place)


def schedule(record: ComparisonRecord) -> Iterator[tuple[ArmRecord, int]]:
    """Launches in order: each repeat turns the last one's order about, which cancels a steady drift."""
    for repeat in range(1, record.repeats + 1):
        for arm in record.arms if repeat % 2 else reversed(record.arms):
            yield arm, repeat


def run_all(folder: Path, record: ComparisonRecord, rig: Rig, tell: Tell, asked: Asked) -> None:
    """Run what has not been run yet; each run's file is written as it ends.

    One Ctrl-C while a server stops that has been measured waits until that run is written.

    Raises:
        DeployError: what a person must fix before any run can go on; its fix tells how.
        KeyboardInterrupt: what had ended is kept, and the server is stopped.
    """
    on = f"dflash-deploy compare --resume --name {record.name}"
    try:
        with alone_on(rig.card, fix="wait for it"):
            _run_all(folder, record, rig, tell, asked)
    except BrokenPipeError:  # who read what we print has left: no file's fault
        raise
    except OSError as error:
        raise DeployError(
            f"{error.filename or folder} cannot be written: {error.strerror or error}",
            fix=f"make room there or mend its permissions, then {on}",
            exit_code=ExitCode.UNAVAILABLE,
        ) from error
    except DeployError as error:
        raise error.then(on) from error


def _run_all(folder: Path, record: ComparisonRecord, rig: Rig, tell: Tell, asked: Asked) -> None:
    steps = list(schedule(record))
    for number, (arm, repeat) in enumerate(steps, 1):
        path = run_path(folder, arm.method, repeat)
        title = f"{arm.method} ({number}/{len(steps)})"
        if path.exists():
            tell(f"{title}: done before")
            continue

        def told(text: str, title: str = title) -> None:
            tell(f"{title}: {text}")

        def finish_first(told: Tell = told) -> AbstractContextManager[None]:
            return asked.finished_first(lambda: told("ending when this launch is written"))

        told("launching")
        with ExitStack() as finishing:
            with hold_room(path.parent):
                ended = run_one(
                    record,
                    arm,
                    repeat=repeat,
                    folder=path.with_suffix(""),
                    rig=rig,
                    tell=told,
                    on_measured=lambda: finishing.enter_context(finish_first()),
                )
            write_record(path, ended)
        told(ended.run.outcome + (f": {ended.run.reason}" if ended.run.reason else ""))
        if asked.politely:
            raise KeyboardInterrupt


def run_one(
    record: ComparisonRecord,
    arm: ArmRecord,
    *,
    repeat: int,
    folder: Path,
    rig: Rig,
    tell: Tell,
    on_measured: Callable[[], object],
) -> RunRecord:
    """Launch one method, load it, examine it, stop it. However it goes, the result is a record.

    Args:
        record: what was asked.
        arm: the method.
        repeat: which launch of it, from 1.
        folder: for the server's log.
        rig: what it runs on.
        tell: is told where it stands.
        on_measured: called when nothing is left to do but to stop the server.
    """
    begun = time.monotonic()
    launcher = rig.launcher
    launch = launcher.launch(arm.flags, launcher.port or free_port(launcher.host))
    run = Run(name=arm.method, outcome="failed")
    examination: Examination | None = None
    server = Server(launch, folder, on_progress=lambda progress: tell(progress.detail))
    with server:
        started = server.start()
        if isinstance(started, NotServed):
            run = run.model_copy(update={"reason": f"{started.stage}: {started.reason}"})
        else:
            endpoint = replace(discover(launch.base_url), time_scale=launch.time_scale)
            run, examination = _measured(record, arm, endpoint, rig, tell)
            on_measured()
            run = run.model_copy(update={"boot_s": started.boot_s})
            missing = degradation(started.boot, record.users)
            if missing and run.outcome == "served":
                run = run.model_copy(update={"notes": [*run.notes, missing]})
            if not server.survives():
                words = server.boot.failure.message if server.boot and server.boot.failure else "it died"
                run = run.model_copy(update={"outcome": "unstable", "reason": words})
        tell("stopping")
        leftovers = server.stop().leftovers
    run = run.model_copy(
        update={
            "repeat": repeat,
            "url": None,
            "model": record.profile.model.target,
            "engine": record.profile.engine.name,
            "engine_version": launcher.table.version,
            "flags": dict(arm.flags),
            "vram_total_mib": rig.memory_mib,
            "notes": [*run.notes, *leftovers],
        }
    )
    return RunRecord(run=run, examination=examination, wall_s=time.monotonic() - begun)


def result_of(folder: Path, record: ComparisonRecord) -> ResultFile:
    """Everything that has ended, with each run's agreement with plain decoding.

    Raises:
        DeployError: a run's file cannot be read.
    """
    steps = [run_path(folder, arm.method, repeat) for arm, repeat in schedule(record)]
    done = [read_run(path) for path in steps if path.exists()]
    plain = next((one.examination for one in done if one.run.name == PLAIN and one.examination), None)
    return ResultFile(
        tool_version=record.tool_version,
        created=record.created,
        kind="simulated" if record.simulated else "measured",
        interrupted=len(done) < len(steps),
        machine=record.machine,
        workload=record.workload,
        runs=[_beside(one, plain) for one in done],
    )


def _rig(profile: Profile, simulated: Simulated | None, place: Place) -> Rig:
    return simulated_rig(profile, simulated, place) if simulated else real_rig(profile, place)


def _protocol(profile: Profile, *, users: int, output_tokens: int, rounds: int) -> Protocol:
    return Protocol(
        "compare",
        "the profile's load: a cold round, and those that count",
        "rounds",
        users=(users,),
        output_tokens=output_tokens,
        warm_up=profile.measure.warm_up,
        rounds=rounds,
        tasks=tuple(profile.workload.tasks.items()),
    )


def _measured(
    record: ComparisonRecord, arm: ArmRecord, endpoint: Endpoint, rig: Rig, tell: Tell
) -> tuple[Run, Examination | None]:
    profile = record.profile
    read_text = profile.measure.check_output
    protocol = _protocol(
        profile, users=record.users, output_tokens=record.output_tokens, rounds=record.rounds
    )
    look = look_here(profile.env) if rig.gauge is not None else None
    run = measured_run(arm.method, endpoint, protocol, _OPTIONS, gpu=look, read_text=read_text, tell=tell)
    if not record.examine or run.failures:
        return run, None
    return examined_run(
        run,
        endpoint,
        users=record.users,
        context_tokens=profile.workload.context_tokens,
        read_text=read_text,
        tell=tell,
    )


def _beside(one: RunRecord, plain: Examination | None) -> Run:
    if one.examination is None or plain is None or one.run.name == PLAIN:
        return one.run
    run = one.run.model_copy(
        update={"quality": quality_of(one.examination, agreement(one.examination, plain))}
    )
    faults = faults_beside(one.examination, plain)
    if faults and run.outcome == "served":
        words = "; ".join(faults)[:_LONGEST_REASON]
        run = run.model_copy(update={"outcome": "unfit", "reason": words})
    return run

"""From a study or a profile to what a service is made of: command, account, and what is known of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash_deploy import __version__
from dflash_deploy.checkpoint.cards import find_model_card
from dflash_deploy.deploy.generations import Manager
from dflash_deploy.deploy.seal import Seal, seal_of
from dflash_deploy.deploy.unit import UnitSpec
from dflash_deploy.engine.sglang.command import launch_argv
from dflash_deploy.engine.sglang.flags import FlagTable
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.profile.load import find, is_path, load_profile
from dflash_deploy.profile.schema import FlagSetting, Profile
from dflash_deploy.serving_env.current import default_python
from dflash_deploy.tune.launching import configured, settings, values, variables
from dflash_deploy.tune.records import Proof, StudyRecord, TrialRecord, read_study, read_trials
from dflash_deploy.tune.select import best_trial, proof_of
from dflash_deploy.tune.space import Settings
from dflash_deploy.tune.studies import find_study, studies_dir

PYTHON_PLACE = Path("/opt/dflash-deploy/env/bin/python")
"""Where the serving environment is taken to be when nothing says otherwise."""

_FREE_SHARE = 0.97


@dataclass(frozen=True)
class Configuration:
    """What a service is to run.

    Attributes:
        source: where it comes from, in words.
        simulated: its figures were simulated.
        engine_version: that its flags were chosen for.
        trial: that it was chosen for, None for a profile's own setting.
        comments: what is known of it, for people, each figure with its kind.
    """

    source: str
    profile: Profile
    flags: dict[str, FlagSetting]
    simulated: bool
    engine_version: str
    trial: TrialRecord | None
    comments: tuple[str, ...]

    @property
    def vram_expected_mib(self) -> int | None:
        """What the card held at most under load."""
        return self.trial.measured.vram_used_mib if self.trial and self.trial.measured else None

    @property
    def vram_free_mib(self) -> int | None:
        """What was free on the card before the engine loaded its model; None where no real card was seen."""
        boot = self.trial.boot if self.trial and not self.simulated else None
        if boot is None or boot.free_before_load_gib is None:
            return None
        return int(boot.free_before_load_gib * 1024 * _FREE_SHARE)

    def python(self, given: Path | None) -> Path:
        """The engine's interpreter: the one given, the profile's, the study's, the one chosen, a default."""
        if given is not None:
            return given.absolute()
        measured_with = self.trial.argv[0] if self.trial and self.trial.argv and not self.simulated else None
        return (
            self.profile.engine.python
            or (Path(measured_with) if measured_with else None)
            or default_python()
            or PYTHON_PLACE
        )


def of_source(source: str | None, trial: int | None) -> Configuration:
    """The configuration of a study, of the latest one, or of a profile.

    Raises:
        DeployError: there is none such, or nothing in it served.
    """
    if source is not None and trial is None and _is_profile(source):
        return of_profile(source)
    return of_study(source, trial)


def of_profile(name: str) -> Configuration:
    """A profile's flags with the first setting that it knows; nothing of it was measured here."""
    profile = load_profile(name)
    known = profile.known[0] if profile.known else None
    given = configured(profile, known.flags if known else {}, simulated=False)
    setting = f", setting {known.name!r}: {known.source}" if known else ""
    source = f"profile {find(name).stem}{setting}"
    comments = (
        f"dflash-deploy {__version__}: {source}, SGLang {profile.engine.version}",
        "Not measured here. Tune on your own card before you rely on it.",
    )
    profile, flags = _apart(profile, given)
    return Configuration(source, profile, flags, False, profile.engine.version, None, comments)


def of_study(study: str | None, number: int | None) -> Configuration:
    """The best trial of a study, or the one of this number.

    Raises:
        DeployError: there is no such study or trial, or it did not serve.
    """
    folder = find_study(study)
    record = read_study(folder)
    trials = read_trials(folder)
    trial = _choose(record, trials, number)
    profile, flags = _apart(record.profile, trial.flags)
    return Configuration(
        f"study {record.name}, trial {trial.number}",
        profile,
        flags,
        record.simulated,
        record.engine_version,
        trial,
        _evidence(record, trial, proof_of(trial, trials)),
    )


def _apart(profile: Profile, given: Settings) -> tuple[Profile, dict[str, FlagSetting]]:
    """The profile with a configuration's variables among its own, and the flags as the engine reads them."""
    env = {**profile.env, **variables(given)}
    return profile.model_copy(update={"env": env}), settings(values(given))


def unit_spec(
    configuration: Configuration,
    *,
    python: Path,
    manager: Manager,
    user: str | None,
    name: str | None = None,
    table: FlagTable | None = None,
    seal: Seal | None = None,
) -> UnitSpec:
    """What its unit is rendered from.

    Raises:
        DeployError: a flag that this SGLang does not have.
    """
    service = configuration.profile.service
    argv = launch_argv(
        python,
        values(configuration.flags),
        host=service.host,
        port=service.port,
        table=table or FlagTable.for_version(configuration.engine_version),
    )
    cards = configuration.flags.get("tensor-parallel-size", configuration.flags.get("tp-size", 1))
    return UnitSpec(
        service=name or service.name,
        argv=argv,
        host=service.host,
        port=service.port,
        env=configuration.profile.env,
        manager=manager,
        user=(user or service.user) if manager == "system" else user,
        api_key_file=str(service.api_key_file) if service.api_key_file else None,
        comments=configuration.comments,
        seal=seal,
        vram_free_mib=configuration.vram_free_mib,
        cards=cards if isinstance(cards, int) and cards > 0 else 1,
    )


def seal_if_there(python: Path) -> Seal | None:
    """The seal of an environment that is on this machine, None where it is not.

    Raises:
        DeployError: it is there, and a patch in it is not intact.
    """
    try:
        return seal_of(python)
    except DeployError as error:
        if error.exit_code is ExitCode.MISSING:
            return None
        raise


def _is_profile(source: str) -> bool:
    """It names a profile, and no study."""
    if (studies_dir() / source / "study.json").is_file() or (Path(source) / "study.json").is_file():
        return False
    if is_path(source):
        return Path(source).expanduser().is_file()
    try:
        find(source)
    except DeployError:
        return False
    return True


def _choose(study: StudyRecord, trials: list[TrialRecord], number: int | None) -> TrialRecord:
    if number is None:
        best = best_trial(study, trials)
        if best is None:
            raise DeployError(
                f"study {study.name} has no configuration that served within its limits",
                fix="give it more trials, or name one yourself with --trial N",
            )
        return best
    numbers = ", ".join(str(one.number) for one in trials)
    chosen = next((trial for trial in trials if trial.number == number), None)
    if chosen is None:
        raise DeployError(
            f"study {study.name} has no trial {number}",
            fix=f"give one that it has: {numbers}" if trials else "dflash-deploy tune",
            exit_code=ExitCode.MISSING,
        )
    if chosen.measured is None or chosen.outcome not in ("served", "degraded", "infeasible"):
        raise DeployError(
            f"trial {number} ended as {chosen.outcome}: {chosen.reason or 'no reason was recorded'}",
            fix="give a trial that served, or leave --trial out for the best one",
        )
    return chosen


def _evidence(study: StudyRecord, trial: TrialRecord, proof: TrialRecord | None) -> tuple[str, ...]:
    """Where the configuration comes from and what is known of it, each figure with its kind."""
    kind = f"simulated {study.card}" if study.simulated else f"measured on {study.card or 'this machine'}"
    lines = [
        f"dflash-deploy {__version__}: study {study.name}, trial {trial.number} ({trial.source}), "
        f"SGLang {study.engine_version}",
    ]
    if study.simulated:
        lines.append(
            "SIMULATED: never run on a card. Tune on the real one before you rely on this configuration."
        )
        for flag in ("model-path", "speculative-draft-model-path"):
            card = find_model_card(str(trial.flags.get(flag, "")))
            if card is not None and card.path is None:
                lines.append(
                    f"--{flag} {card.id}: everyone makes this model for themselves; put its folder there."
                )
    if trial.violations:
        lines.append(f"It breaks limits of its profile: {', '.join(sorted(trial.violations))}.")
    if (measured := trial.measured) is not None:
        lines.append(
            f"{measured.users} at once: {measured.total_tokens_per_s.median:.1f} tokens/s in all, "
            f"{measured.user_tokens_per_s.median:.1f} for the median user, "
            f"TTFT p95 {measured.ttft_p95_s:.2f} s ({kind})"
        )
        if measured.vram_used_mib is not None:
            total = f" of {measured.vram_total_mib:,}" if measured.vram_total_mib else ""
            lines.append(f"VRAM at most {measured.vram_used_mib:,}{total} MiB ({kind})")
    lines.append(_proven(proof.proof if proof else None, kind))
    return tuple(lines)


def _proven(proof: Proof | None, kind: str) -> str:
    if proof is None:
        return "Not proven: it was not started again and used for long."
    if proof.problem is not None:
        return f"It did not hold when it was started again: {proof.problem} ({kind})"
    free = "" if proof.free_mib is None else f", with {proof.free_mib:,} MiB free at the least"
    exam = "" if proof.exam is None else f"; then {proof.exam.words}"
    return (
        f"Started again it held: {proof.answer_tokens:,} tokens in one answer and "
        f"{proof.context_tokens:,} tokens of context for everybody at once{free}{exam} ({kind})"
    )

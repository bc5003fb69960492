"""What a profile must keep beyond the form of its keys: that its parts fit one another."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from dflash_deploy import yaml_file
from dflash_deploy.checkpoint.cards import ModelCard, find_model_card, model_ids
from dflash_deploy.engine.sglang.command import Method
from dflash_deploy.engine.sglang.drafting import PREFIX, reads
from dflash_deploy.errors import DeployError
from dflash_deploy.machine.cards import card_ids
from dflash_deploy.profile.drafts import no_draft, speculation_of
from dflash_deploy.profile.schema import METHOD, VARIABLE, Choices, FlagSetting, Profile, flag_value
from dflash_deploy.yaml_file import Document, InvalidDocument, KeyPath, Problem

Complaint = tuple[KeyPath, str]
_Check = tuple[set[str], Callable[[Profile], Iterator[Complaint]]]
"""The top-level keys that a check reads, and the check."""

_SET_ELSEWHERE = {
    "model-path": "model.target or model.path",
    "model": "model.target or model.path",
    "served-model-name": "model.served_name",
    "quantization": "model.quantization",
    "speculative-algorithm": "speculation.method",
    "speculative-draft-model-path": "speculation.draft or speculation.draft_path",
    "host": "service.host",
    "port": "service.port",
    "method": "speculation.method",
    "api-key": "service.api_key_file, for a command line can be read by everybody on the machine",
    "admin-api-key": "service.api_key_file, for a command line can be read by everybody on the machine",
    "config": "flags, one key each",
}


_METHODS: tuple[Method, ...] = get_args(Method)
_CARD_SETTINGS = (f"{VARIABLE}CUDA_VISIBLE_DEVICES", f"{VARIABLE}CUDA_DEVICE_ORDER")

_HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_SECRET_NAME = re.compile(
    r"(?:.*_)?KEY|.*_(?:PASS|PAT|PWD)|.*(?:TOKEN|APIKEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)",
    re.IGNORECASE,
)
_NO_SECRET = re.compile(r"[0-9.]*|true|false", re.IGNORECASE)


def problems_of(document: Document) -> list[Problem]:
    """Every mistake in a profile: of form, and of sense in all parts whose form is right."""
    problems: list[Problem] = []
    try:
        yaml_file.validate(document, Profile)
    except InvalidDocument as error:
        problems += error.problems
    problems += (document.problem(key, message) for key, message in _complaints(document, _CHECKS))
    return sorted(problems, key=lambda problem: problem.origin)


def ruled_out(document: Document) -> set[int]:
    """Which of the known settings contradict the rest of the profile."""
    complaints = _complaints(document, _CHECKS_OF_KNOWN)
    return {key[1] for key, _ in complaints if len(key) > 1 and key[0] == "known" and isinstance(key[1], int)}


def _complaints(document: Document, checks: Sequence[_Check]) -> Iterator[Complaint]:
    if isinstance(document.value, dict):
        parts = _right_parts(document.value)
        profile = Profile.model_construct(None, **parts)
        for needs, check in checks:
            if parts.keys() >= needs:
                yield from check(profile)


def is_loopback(host: str) -> bool:
    """Only this machine can reach a service at ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _right_parts(value: Mapping[str, object]) -> dict[str, Any]:
    """Top-level keys whose form is right, and the defaults of those that are not given."""
    parts: dict[str, Any] = {}
    for name, info in Profile.model_fields.items():
        if name not in value:
            if not info.is_required():
                parts[name] = info.get_default(call_default_factory=True)
            continue
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(info.rebuild_annotation())
            parts[name] = adapter.validate_python(value[name])
        except ValidationError:
            continue
    return parts


def _card(profile: Profile) -> Iterator[Complaint]:
    if profile.card is not None and profile.card not in card_ids():
        yield ("card",), _unknown("card", profile.card, card_ids())


def _models(profile: Profile) -> Iterator[Complaint]:
    model, speculation = profile.model, profile.speculation
    target = find_model_card(model.target)
    if target is None and not _is_place(model.target):
        yield ("model", "target"), _unknown("model", model.target, model_ids())
    if target is not None and target.role != "target":
        yield ("model", "target"), f"{target.id} is a draft, not a target"
    if speculation.method in ("none", "ngram"):
        for name in ("draft", "draft_path"):
            if getattr(speculation, name) is not None:
                yield ("speculation", name), f"method {speculation.method} has no draft model"
        return
    if speculation.draft is None:
        if speculation.draft_path is None and speculation.method != "mtp":
            yield ("speculation",), f"method {speculation.method} needs a draft (or draft_path)"
        return
    yield from _draft(target, ("speculation", "draft"), speculation.draft, speculation.method)


def _drafts(profile: Profile) -> Iterator[Complaint]:
    target = find_model_card(profile.model.target)
    for method, named in profile.speculation.drafts.items():
        place = ("speculation", "drafts", method)
        if method == profile.speculation.method:
            yield place, f"{method} is this profile's own method: its draft stands in speculation.draft"
        else:
            yield from _draft(target, place, named, method)


def _draft(target: ModelCard | None, place: KeyPath, named: str, method: Method) -> Iterator[Complaint]:
    draft = find_model_card(named)
    if draft is None:
        if not _is_place(named):
            yield place, _unknown("model", named, model_ids())
        return
    if draft.method != method:
        kind = f"a {draft.method} draft" if draft.method else "a target"
        yield place, f"{draft.id} is {kind}, method {method} needs another"
    elif target is not None and target.id not in draft.targets:
        yield place, f"{draft.id} was made for {', '.join(draft.targets)}, not for {target.id}"


def _is_place(name: str) -> bool:
    """A folder or hub name, which needs no card."""
    return "/" in name


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    known = list(known)
    hint = yaml_file.nearest(name, known) or f"; expected one of {', '.join(known)}"
    return f"unknown {what} {yaml_file.describe(name)}{hint}"


def _service(profile: Profile) -> Iterator[Complaint]:
    service = profile.service
    if service.api_key_file is None and not is_loopback(service.host):
        yield (
            ("service", "host"),
            f"others can reach {service.host}: give service.api_key_file too, or listen on 127.0.0.1",
        )


def _flags(profile: Profile) -> Iterator[Complaint]:
    for name in profile.flags.keys() & profile.search.keys():
        yield ("flags", name), "both fixed here and searched in search: keep one"


def _env(profile: Profile) -> Iterator[Complaint]:
    for name in profile.env:
        if f"{VARIABLE}{name}" in profile.search:
            yield ("env", name), "both fixed here and searched in search: keep one"


def _settings(profile: Profile, part: str) -> Iterator[tuple[KeyPath, KeyPath, str, FlagSetting]]:
    """Every value that a flag may get in one part: place of the flag, of the value, name, value."""
    if part == "flags":
        for name, value in profile.flags.items():
            yield ("flags", name), (), name, value
    elif part == "search":
        for name, bounds in profile.search.items():
            place = ("search", name)
            if isinstance(bounds, Choices):
                for index, choice in enumerate(bounds.choices):
                    if choice is not None:
                        yield place, ("choices", index), name, choice
            else:
                yield place, ("low",), name, bounds.low
                yield place, ("high",), name, bounds.high
    else:
        for index, known in enumerate(profile.known):
            for name, value in known.flags.items():
                yield ("known", index, "flags", name), (), name, value


def _engine_flags(profile: Profile, part: str) -> Iterator[Complaint]:
    from dflash_deploy.engine.sglang.flags import FlagTable  # noqa: PLC0415 -- only a check needs the table

    table = FlagTable.for_version(profile.engine.version)
    told: set[KeyPath] = set()
    for place, rest, name, value in _settings(profile, part):
        if name.startswith(VARIABLE) or (name == METHOD and part != "flags"):
            continue
        key = (*place, *rest)
        if name in _SET_ELSEWHERE:
            key, message = place, f"is set by {_SET_ELSEWHERE[name]}"
        else:
            try:
                table.spell({name: flag_value(value)})
            except DeployError as error:
                # The first line says which version would refuse; what follows is the reason.
                message = " ".join(error.message.partition("\n")[2].split())
                key = key if table.find(name) else place
            else:
                continue
        if key not in told:
            told.add(key)
            yield key, message


def _speculative_flags(profile: Profile, part: str) -> Iterator[Complaint]:
    offered = _offered_methods(profile)
    names = {place: name for place, _, name, _ in _settings(profile, part) if name.startswith(PREFIX)}
    for place, name in names.items():
        if offered == ("none",):
            yield place, "means nothing with speculation.method none"
        elif METHOD in profile.search and not any(reads(method, name) for method in offered):
            yield place, f"no method that is tried reads it: {', '.join(offered)}"


def _offered_methods(profile: Profile) -> tuple[Method, ...]:
    """Methods that a server may be launched with."""
    bounds = profile.search.get(METHOD)
    if not isinstance(bounds, Choices):
        return (profile.speculation.method,)
    return tuple(method for method in _METHODS if method in bounds.choices)


def _methods(profile: Profile) -> Iterator[Complaint]:
    bounds, own = profile.search.get(METHOD), profile.speculation.method
    place = ("search", METHOD)
    if bounds is None:
        for index, known in enumerate(profile.known):
            if METHOD in known.flags:
                yield (
                    ("known", index, "flags", METHOD),
                    "no methods are searched: add search.method with this one and the profile's own",
                )
        return
    if not isinstance(bounds, Choices):
        yield place, "methods are no numbers: give choices"
        return
    for index, choice in enumerate(bounds.choices):
        key = (*place, "choices", index)
        method = next((method for method in _METHODS if method == choice), None)
        if choice is None:
            yield key, "write none for decoding without drafts"
        elif method is None:
            hint = yaml_file.nearest(str(choice), _METHODS)
            said = hint or f"; expected one of {', '.join(_METHODS)}"
            yield key, f"there is no method {yaml_file.describe(choice)}{said}"
        elif speculation_of(profile, method) is None:
            yield key, f"{no_draft(profile, method)}: name one in speculation.drafts.{method}"
    if own not in bounds.choices:
        yield place, f"the profile's own method, {own}, is not among the choices"


def _variables(profile: Profile, part: str) -> Iterator[Complaint]:
    """That variables which are searched, or known, can be given to a server and told to others."""
    named: list[KeyPath] = [("search", name) for name in profile.search] if part == "search" else []
    named += [place for place, *_ in _settings(profile, part) if part == "known"]
    for place in named:
        # Left unset it would choose as well.
        if place[-1] in _CARD_SETTINGS:
            yield place, "the card is chosen with --gpu"
    for place, rest, setting, value in _settings(profile, part):
        name = setting.removeprefix(VARIABLE)
        if not setting.startswith(VARIABLE) or setting in _CARD_SETTINGS:
            continue
        if part == "search" and not isinstance(profile.search[setting], Choices):
            if rest == ("low",):
                yield place, "a variable is text: give choices"
        elif not isinstance(value, str):
            yield (*place, *rest), f"a variable is text of one line, found {yaml_file.describe(value)}"
        elif _is_secret(name, value):
            yield place, _secret(name)


def _users(profile: Profile) -> Iterator[Complaint]:
    users = profile.workload.users
    yield from _too_small(
        profile, "max-running-requests", users, f"serves fewer than the {users} users of workload.users"
    )
    tokens = users * profile.workload.context_tokens
    yield from _too_small(
        profile,
        "max-total-tokens",
        tokens,
        f"holds less than the {tokens} tokens of workload.users x workload.context_tokens",
    )
    yield from _too_small(
        profile,
        "context-length",
        profile.workload.context_tokens,
        f"is below workload.context_tokens, {profile.workload.context_tokens}",
    )


def _too_small(profile: Profile, flag: str, least: int, why: str) -> Iterator[Complaint]:
    """Places where no value of ``flag`` reaches ``least``."""
    for place, values in _offers(profile, flag):
        numbers = [value for value in values if isinstance(value, int | float)]
        if len(numbers) == len(values) and max(numbers) < least:
            yield place, why


def _offers(profile: Profile, flag: str) -> Iterator[tuple[KeyPath, list[FlagSetting | None]]]:
    if flag in profile.flags:
        yield ("flags", flag), [profile.flags[flag]]
    if flag in profile.search:
        bounds = profile.search[flag]
        yield ("search", flag), bounds.choices if isinstance(bounds, Choices) else [bounds.high]
    for index, known in enumerate(profile.known):
        if flag in known.flags:
            yield ("known", index, "flags", flag), [known.flags[flag]]


def _known_within(profile: Profile) -> Iterator[Complaint]:
    for index, known in enumerate(profile.known):
        for name, value in known.flags.items():
            place: KeyPath = ("known", index, "flags", name)
            where, fixed = _fixed(profile, name)
            bounds = profile.search.get(name)
            if fixed is not None and fixed != value:
                yield place, f"{where} fixes {name} to another value, {yaml_file.describe(fixed)}"
            if bounds is None:
                continue
            if isinstance(bounds, Choices):
                if value not in bounds.choices:
                    yield place, f"is none of the choices of search.{name}"
            elif not isinstance(value, int | float) or not bounds.low <= value <= bounds.high:
                yield place, f"is outside search.{name}, {bounds.low} to {bounds.high}"


def _fixed(profile: Profile, name: str) -> tuple[str, FlagSetting | None]:
    """What every configuration has of a setting, and where it says so."""
    if name.startswith(VARIABLE):
        return "env", profile.env.get(name.removeprefix(VARIABLE))
    return "flags", profile.flags.get(name)


def _context(profile: Profile) -> Iterator[Complaint]:
    target = find_model_card(profile.model.target)
    if target is not None and profile.workload.context_tokens > target.max_context_tokens:
        yield (
            ("workload", "context_tokens"),
            f"{target.id} reads at most {target.max_context_tokens} tokens",
        )


_CHECKS_OF_KNOWN: tuple[_Check, ...] = (
    ({"flags", "search", "known", "workload"}, _users),
    ({"flags", "env", "search", "known"}, _known_within),
)


def _secrets(profile: Profile) -> Iterator[Complaint]:
    for name, value in profile.env.items():
        if _is_secret(name, value):
            yield ("env", name), _secret(name)


def _is_secret(name: str, value: str) -> bool:
    return bool(_SECRET_NAME.fullmatch(name)) and not _NO_SECRET.fullmatch(value)


def _secret(name: str) -> str:
    hub = " (the hub's: hf auth login, or env.HF_TOKEN_PATH with the path of a 0600 file)"
    return (
        "a secret may not stand here, for records of studies and units can be read by everybody; "
        f"export {name} in the shell that runs tune, and give it to a service by a 0600 file: "
        "systemctl edit SERVICE, then [Service] and EnvironmentFile=/path/to/that/file"
        + (hub if name in _HUB_TOKENS else "")
    )


_CHECKS: tuple[_Check, ...] = (
    ({"card"}, _card),
    ({"env"}, _secrets),
    ({"model", "speculation"}, _models),
    ({"model", "speculation"}, _drafts),
    ({"model", "speculation", "search", "known"}, _methods),
    ({"service"}, _service),
    ({"flags", "search"}, _flags),
    ({"env", "search"}, _env),
    *(({part}, partial(_variables, part=part)) for part in ("search", "known")),
    *(({part, "engine"}, partial(_engine_flags, part=part)) for part in ("flags", "search", "known")),
    *(
        ({part, "speculation", "search"}, partial(_speculative_flags, part=part))
        for part in ("flags", "search", "known")
    ),
    ({"model", "workload"}, _context),
    *_CHECKS_OF_KNOWN,
)

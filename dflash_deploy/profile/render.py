"""A profile written out: for people as YAML, for scripts as JSON values."""

from __future__ import annotations

import yaml

from dflash_deploy.errors import DeployError
from dflash_deploy.profile.load import ResolvedProfile
from dflash_deploy.profile.schema import Profile
from dflash_deploy.yaml_file import InvalidDocument, dotted, is_plain_text

SCHEMA_VERSION = 1

_COMMENTS = {
    "summary": "One line that says what this is for.",
    "card": "Known card to plan for (profiles/cards); leave it out to plan for the card that is found.",
    "model": "The target: id of a model card (profiles/models), or a folder, or a hub name. path: its place.",
    "speculation": "method: none, ngram, mtp, dspark or dflash; draft: a model card; drafts: for others.",
    "engine": "Flags are written for this version of the engine. python: interpreter of its environment.",
    "workload": "Users at once, tokens that each may hold, tokens an answer takes, weights of the tasks.",
    "objective": "The figure to make best, and the limits that a configuration must keep (min, max).",
    "flags": "Engine flags that stay as they are, by full name.",
    "env": "Environment variables of the server; put values in quotes.",
    "search": "What to try: low, high and step, or choices (null leaves it out). Also env.NAME, and method.",
    "known": "Settings somebody tuned by hand: tried first, and the mark to beat.",
    "measure": "Measured rounds of a trial, after the warm-up rounds.",
    "service": "The service that comes out. A host that others can reach needs api_key_file.",
}


_SMALL = {"low", "high", "step", "choices", "min", "max"}


class _Dumper(yaml.SafeDumper):
    """Block style, with bounds and plain lists on one line."""


def _write_list(dumper: yaml.SafeDumper, items: list[object]) -> yaml.Node:
    plain = not any(isinstance(item, dict) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=plain)


def _write_mapping(dumper: yaml.SafeDumper, mapping: dict[str, object]) -> yaml.Node:
    return dumper.represent_mapping("tag:yaml.org,2002:map", mapping, flow_style=mapping.keys() <= _SMALL)


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    quotes = None if is_plain_text(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=quotes)


_Dumper.add_representer(list, _write_list)
_Dumper.add_representer(dict, _write_mapping)
_Dumper.add_representer(str, _write_text)


def as_json(resolved: ResolvedProfile) -> dict[str, object]:
    """What ``profile show --json`` prints."""
    return {
        "schema_version": SCHEMA_VERSION,
        "name": resolved.name,
        "files": [str(path) for path in resolved.files],
        "profile": resolved.profile.model_dump(mode="json"),
    }


def verdict(asked: str, error: DeployError | None) -> dict[str, object]:
    """One profile's part of what ``profile validate --json`` prints; ``error`` is None where it is right."""
    problems: list[dict[str, object]] = []
    if isinstance(error, InvalidDocument):
        problems = [
            {
                "source": problem.origin.source,
                "line": problem.origin.line or None,
                "column": problem.origin.column or None,
                "key": dotted(problem.key),
                "message": problem.message,
            }
            for problem in error.problems
        ]
    elif error is not None:
        problems = [{"source": asked, "line": None, "column": None, "key": "", "message": error.message}]
    return {"profile": asked, "valid": error is None, "problems": problems}


def as_yaml(profile: Profile) -> str:
    """The whole profile, defaults written out, as a file that loads to the same profile."""
    return _dump(_content(profile))


def starting_file(profile: Profile, *, name: str, origin: str) -> str:
    """As ``as_yaml``, with a comment over every part."""
    parts = [f"# {name}: a service profile, begun from {origin}."]
    content = _content(profile)
    for key, comment in _COMMENTS.items():
        if key in content:
            parts.append(f"# {comment}\n{_dump({key: content[key]}).rstrip()}")
        else:
            parts.append(f"# {comment}\n# {key}:")
    return "\n\n".join(parts) + "\n"


def _content(profile: Profile) -> dict[str, object]:
    content: dict[str, object] = profile.model_dump(mode="json", exclude_none=True)
    search = profile.model_dump(mode="json", include={"search"})
    return {
        key: value for key, value in (content | search).items() if value not in ({}, []) or key == "search"
    }


def _dump(content: dict[str, object]) -> str:
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)

"""A pasted command as a value, whatever form it came in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dflash_deploy.engine.launch import FlagValue
from dflash_deploy.engine.sglang.flags import FlagProblem, FlagTable
from dflash_deploy.engine.sglang.pasted import container, embedded, unit
from dflash_deploy.engine.sglang.pasted.flags import (
    config_words,
    mapping_words,
    read_flags,
    with_graph_config,
    without_unknown,
)
from dflash_deploy.engine.sglang.pasted.launch import (
    Found,
    bare_flags,
    in_statements,
    in_words,
    pinned_version,
)
from dflash_deploy.engine.sglang.pasted.log import flags_of, has_server_args, logged_version, server_args
from dflash_deploy.engine.sglang.pasted.shell import Shell
from dflash_deploy.engine.sglang.pasted.text import cleaned, word_as_meant
from dflash_deploy.engine.sglang.pasted.words import MAX_WORDS, Notes, too_large
from dflash_deploy.engine.sglang.versions import NEWEST
from dflash_deploy.errors import DeployError, ExitCode


@dataclass(frozen=True)
class PastedCommand:
    """What somebody starts, or started, SGLang with.

    Attributes:
        argv: SGLang's own arguments, secrets blotted out, without those whose value is not known.
        flags: the same by their newest names, with what a readable ``--config`` file sets beneath.
        env: variables set for it; may hold secrets.
        source: where it was read.
        version: the SGLang that ``flags`` and ``problems`` are read for.
        version_from: what says so: ``given``, ``text`` (an image's tag, a pinned package, a log), ``newest``
            where nothing does.
        problems: what that SGLang's parser would refuse, or warn of.
        notes: how it was read: what was corrected, what is not known.
    """

    argv: tuple[str, ...]
    flags: Mapping[str, FlagValue]
    env: Mapping[str, str] = field(repr=False)
    source: str
    version: str
    version_from: str
    problems: tuple[FlagProblem, ...] = ()
    notes: tuple[str, ...] = ()


def read_words(words: Sequence[str], *, version: str | None = None) -> PastedCommand:
    """Read a command that a shell has split into words already.

    Raises:
        DeployError: it does not start SGLang.
    """
    if len(words) > MAX_WORDS:
        raise too_large("the command")
    if len(words) == 1:
        return read_text(words[0], source="the command line", version=version)
    notes = Notes()
    found = in_words([_as_meant(word, notes) for word in words], notes)
    if found is None:
        raise _no_launch("the command line")
    return _command(found, "the command line", None, version, notes=notes)


def read_text(
    text: str, *, source: str, folder: Path | None = None, version: str | None = None
) -> PastedCommand:
    """Read a shell script, a unit, a compose file, a manifest, a file of flags, or a log.

    Args:
        text: what was pasted.
        source: where from, for messages.
        folder: that relative paths in it start from.
        version: of SGLang, where it is known better than from the text.

    Raises:
        DeployError: nothing in it starts SGLang.
    """
    if has_server_args(text):
        return read_log(text, source=source, version=version)
    notes = Notes()
    plain = cleaned(text, notes)
    pinned = pinned_version(plain)
    if unit.looks_like_unit(plain):
        launches = list(unit.in_unit(plain, notes))
    elif container.looks_like_yaml(plain):
        launches = _in_yaml(plain, source, notes)
    else:
        launches = _in_script(plain, notes)
        if not launches:
            flat = _flat_config(plain, source)
            if flat is not None:
                return _from_mapping(flat, source, version or pinned, given=version is not None, notes=notes)
    if not launches:
        raise _no_launch(source)
    if len(launches) > 1:
        lines = ", ".join(str(one.line) for one in launches[:8] if one.line)
        notes.add(
            f"{len(launches)} commands start SGLang here{f' (lines {lines})' if lines else ''}: "
            "the first is planned"
        )
    return _command(launches[0], source, folder, version, notes=notes, pinned=pinned)


def read_log(text: str, *, source: str, version: str | None = None) -> PastedCommand:
    """Read the settings that a server printed when it started.

    Raises:
        DeployError: the log does not hold them.
    """
    arguments = server_args(text)
    if not arguments:
        raise DeployError(
            f"{source}: no server_args= line, which SGLang prints first when it starts",
            fix="give the log from the start of the server on",
            exit_code=ExitCode.INVALID_INPUT,
        )
    logged = logged_version(text)
    table = FlagTable.for_version(version or logged or NEWEST)
    flags = flags_of(arguments, table)
    notes = Notes()
    notes.add("settings are read from server_args=, where SGLang has filled in what the command left out")
    return PastedCommand(
        argv=(),
        flags=with_graph_config(flags),
        env={},
        source=source,
        version=table.version,
        version_from="given" if version else "text" if logged else "newest",
        notes=notes.all(),
    )


def _in_script(text: str, notes: Notes) -> list[Found]:
    shell = Shell(text, notes)
    statements = list(shell.statements())
    launches = list(in_statements(statements, notes))
    for document in shell.here_documents if not launches else ():
        launches += in_statements(Shell(document, notes).statements(), notes)
    if launches:
        return launches
    flags = [found for statement in statements if (found := bare_flags(statement)) is not None]
    return flags[:1] or _in_other_text(text, notes)[:1]


def _in_other_text(text: str, notes: Notes) -> list[Found]:
    found = [in_words(words, notes) for words in embedded.word_lists(text)]
    for part in embedded.mentioned(text) if not any(found) else ():
        statements = list(Shell(part, notes).statements())
        found += in_statements(statements, notes)
        found += [bare_flags(statement) for statement in statements] if not any(found) else []
    return [one for one in found if one is not None]


def _in_yaml(text: str, source: str, notes: Notes) -> list[Found]:
    try:
        trees = container.read_trees(text, source)
    except DeployError:
        # Some scripts have lines that look like YAML's keys.
        launches = _in_script(text, notes)
        if launches:
            return launches
        raise
    return list(container.in_trees(trees, notes)) or _in_script(text, notes)


def _flat_config(text: str, source: str) -> dict[str, container.Tree] | None:
    """The mapping of a file that is meant for SGLang's own ``--config``."""
    try:
        trees = container.read_trees(text, source)
    except DeployError:
        return None
    first = trees[0] if trees else None
    return first if isinstance(first, dict) and {"model-path", "model_path"} & set(first) else None


def _from_mapping(
    mapping: Mapping[str, object], source: str, version: str | None, *, given: bool, notes: Notes
) -> PastedCommand:
    table = FlagTable.for_version(version or NEWEST)
    argv = mapping_words(mapping, table, notes)
    return PastedCommand(
        argv=argv,
        flags=read_flags(argv, table),
        env={},
        source=source,
        version=table.version,
        version_from="given" if given else "text" if version else "newest",
        problems=table.problems(argv),
        notes=notes.all(),
    )


def _command(
    found: Found,
    source: str,
    folder: Path | None,
    version: str | None,
    *,
    notes: Notes,
    pinned: str | None = None,
) -> PastedCommand:
    said = found.version or pinned
    table = FlagTable.for_version(version or said or NEWEST)
    argv = without_unknown(found.arguments, table, notes)
    config = config_words(argv, table, folder, notes)
    return PastedCommand(
        argv=argv,
        flags=read_flags((*config, *argv), table),
        env=dict(found.env),
        source=source,
        version=table.version,
        version_from="given" if version else "text" if said else "newest",
        problems=table.problems((*config, *argv)),
        notes=notes.all(),
    )


def _as_meant(word: str, notes: Notes) -> str:
    """A word without typographic marks; no shell has taken off the quotes that curly ones stand for."""
    meant = word_as_meant(word, notes)
    if meant != word and meant[:1] in ("'", '"') and meant[:1] == meant[-1:]:
        return meant[1:-1]
    return meant


def _no_launch(source: str) -> DeployError:
    return DeployError(
        f"{source}: no command that starts SGLang",
        fix="give one with `python -m sglang.launch_server --model-path …` or `sglang serve …` in it",
        exit_code=ExitCode.INVALID_INPUT,
    )

"""Where in a command SGLang begins, and what stands before it: variables, containers, wrappers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dflash_deploy.engine.sglang.pasted.shell import Shell
from dflash_deploy.engine.sglang.pasted.words import Notes, Statement, Word

_MODULES = ("sglang.launch_server", "sglang.srt.launch_server", "dflash_deploy.simulator")
_SCRIPT = re.compile(r"(?:^|/)launch_server\.py$")
_ENV = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_IMAGE = re.compile(r"(?:^|/)sglang[\w.-]*(?::(?P<tag>[\w.-]+))?(?:@sha256:[0-9a-f]+)?$")
_NESTED = re.compile(r"\bsglang\b")
_MODEL_FLAG = re.compile(r"--model(?:-path)?(?:=|$)")
_FLAG = re.compile(r"--?[A-Za-z]")
_MENTIONING = frozenset(
    {"echo", "printf", "grep", "pgrep", "pkill", "alias", "which", "ps", "cat", "kill", "killall"}
)
_WRAPPERS = frozenset(
    {"env", "exec", "nohup", "sudo", "time", "nice", "ionice", "setsid", "command", "stdbuf"}
)
_PINNED = re.compile(
    r"\bsglang(?:\[[\w,]{0,40}\])?==(?P<version>\d+(?:\.\d+){1,3}(?:\.?(?:post|rc|dev)\d+)?)"
)
_TAGGED = re.compile(
    r"(?im)^[ \t]*(?:FROM[ \t]+\S{0,200}\bsglang:|repository:[ \t]*\S{0,200}\bsglang\s{1,40}tag:[ \t]*[\"']?)"
    r"v?(?P<version>\d+\.\d+\.\d+(?:\.post\d+)?)"
)
_REPORTED = re.compile(
    r"(?im)^[ \t*-]{0,20}sglang(?: version)?[ \t]{0,20}[:=][ \t]{0,20}v?"
    r"(?P<version>0\.\d+\.\d+(?:\.?(?:post|rc)\d+)?)[ \t]{0,20}$"
)
_RELEASE = re.compile(r"v?(?P<version>\d+\.\d+\.\d+(?:\.post\d+)?)(?:$|[-_])")
_DEEPEST = 3


@dataclass(frozen=True)
class Found:
    """A command that starts SGLang.

    Attributes:
        arguments: what SGLang itself is given.
        env: variables set for it.
        version: of SGLang, where an image's tag or a pinned package tells it.
        line: of the text, from one.
    """

    arguments: tuple[Word, ...]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    version: str | None = None
    line: int = 0


def in_statements(statements: Iterable[Statement], notes: Notes, *, depth: int = 0) -> Iterator[Found]:
    """Every command among these that starts SGLang, those inside ``bash -c '…'`` too."""
    for statement in statements:
        if statement.words[0].text in _MENTIONING:
            continue
        found = _in_statement(statement)
        if found is not None:
            yield found
            continue
        if depth < _DEEPEST:
            for word in statement.words[1:]:
                if _NESTED.search(word.text) and re.search(r"\s", word.text):
                    env = dict(statement.env) | _leading_env(statement.words)
                    for inner in in_statements(
                        Shell(word.text, notes, env).statements(), notes, depth=depth + 1
                    ):
                        outer = statement.words[: statement.words.index(word)]
                        yield replace(
                            inner,
                            env={**_leading_env(outer), **inner.env},
                            version=inner.version or _version_of(outer),
                            line=statement.line,
                        )


def in_words(words: Sequence[str], notes: Notes) -> Found | None:
    """The same for words that a shell has split already."""
    if len(words) == 1 and re.search(r"\s", words[0]):
        return next(in_statements(Shell(words[0], notes).statements(), notes), None)
    statement = Statement(tuple(Word(word) for word in words), {}, 1)
    return next(in_statements([statement], notes), None) or bare_flags(statement)


def in_container(words: Sequence[Word], env: Mapping[str, str], image: str, notes: Notes) -> Found | None:
    """The command of a container, whose image may bring the part before the flags."""
    if not words:
        return None
    statement = Statement(tuple(words), env, words[0].line)
    found = next(in_statements([statement], notes), None)
    if found is None and (_IMAGE.search(image) or any(_MODEL_FLAG.match(word.text) for word in words)):
        found = bare_flags(statement)
    if found is None:
        return None
    return replace(found, env={**env, **found.env}, version=found.version or _version_of([Word(image)]))


def bare_flags(statement: Statement) -> Found | None:
    """SGLang's flags without the command in front of them."""
    words = statement.words
    model = next((at for at, word in enumerate(words) if _MODEL_FLAG.match(word.text)), None)
    if model is None:
        return None
    image = next((at for at in range(model - 1, -1, -1) if _IMAGE.search(words[at].text)), None)
    if image is not None:
        start = image + 1
    else:
        if not _FLAG.match(words[0].text):
            return None
        start = 0
    return Found(words[start:], _env(statement, start), _version_of(words[:start]), statement.line)


def pinned_version(text: str) -> str | None:
    """A release that the text names: ``sglang==0.5.19``, an image to build on, ``sglang: 0.5.19``."""
    match = _PINNED.search(text) or _TAGGED.search(text) or _REPORTED.search(text)
    return match["version"] if match else None


def _in_statement(statement: Statement) -> Found | None:
    words = statement.words
    start = _after_entry([word.text for word in words])
    if start is None:
        return None
    arguments = _with_model(words, start)
    return Found(arguments, _env(statement, start), _version_of(words[:start]), statement.line)


def _after_entry(words: Sequence[str]) -> int | None:
    """Index of SGLang's first argument."""
    for at, word in enumerate(words):
        following = words[at + 1] if at + 1 < len(words) else ""
        if word == "-m" and following in _MODULES:
            return at + 2
        if word.startswith("-m") and word[2:] in _MODULES:
            return at + 1
        if _serves(word) and following == "serve":
            return at + 2
        if _SCRIPT.search(word):
            return at + 1
    return None


def _serves(word: str) -> bool:
    return word.rpartition("/")[2] == "sglang" or word.endswith("sglang.cli.main")


def _with_model(words: Sequence[Word], start: int) -> tuple[Word, ...]:
    """The arguments; ``sglang serve MODEL`` may name its model without the flag."""
    arguments = tuple(words[start:])
    first = arguments[0] if arguments else None
    if first is None or words[start - 1].text != "serve" or first.text.startswith("-"):
        return arguments
    if any(_MODEL_FLAG.match(word.text) for word in arguments):
        return arguments
    return (Word("--model-path", (), first.line), *arguments)


def _env(statement: Statement, start: int) -> dict[str, str]:
    return {**statement.env, **_leading_env(statement.words[:start])}


def _leading_env(words: Sequence[Word]) -> dict[str, str]:
    """``A=b`` at the front, and what ``docker run -e A=b`` sets."""
    env: dict[str, str] = {}
    at_front = True
    before = ""
    for word in words:
        text = word.text
        for option in ("--env=", "-e"):
            if text.startswith(option) and _ENV.match(text[len(option) :]):
                name, _, value = text[len(option) :].partition("=")
                env[name] = value
        if _ENV.match(text) and (at_front or before in ("-e", "--env")):
            name, _, value = text.partition("=")
            env[name] = value
        elif not text.startswith("-") and text not in _WRAPPERS:
            at_front = False
        before = text
    return env


def _version_of(words: Iterable[Word]) -> str | None:
    for word in words:
        image = _IMAGE.search(word.text)
        release = _RELEASE.match(image["tag"]) if image and image["tag"] else None
        if release is not None:
            return release["version"]
        pinned = pinned_version(word.text)
        if pinned is not None:
            return pinned
    return None

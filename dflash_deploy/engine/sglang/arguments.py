"""SGLang's command line, read as its own parser reads it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from dflash_deploy.engine.sglang.options import READERS, REQUIRED, Option, instead_words

_CONFIG_LIMIT_BYTES = 1 << 20


def server_parser(options: Iterable[Option], prog: str) -> argparse.ArgumentParser:
    """A parser of these options; ``--config FILE`` is read as SGLang reads it."""
    parser = _ServerParser(prog=prog)
    for option in options:
        _add(parser, option)
    return parser


class _ServerParser(argparse.ArgumentParser):
    """Puts what a ``--config`` file says before the arguments, so that those win."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        if "--config" in words:
            at = words.index("--config")
            if words.count("--config") > 1 or at + 1 == len(words):
                self.error("argument --config: expected one file")
            words = self._config_arguments(Path(words[at + 1])) + words[:at] + words[at + 2 :]
        return super().parse_known_args(words, namespace)

    def _config_arguments(self, path: Path) -> list[str]:
        import yaml  # noqa: PLC0415 -- rarely needed, and slow to import

        if path.suffix not in (".yaml", ".yml"):
            self.error(f"argument --config: {path} is no .yaml file")
        try:
            with path.open("rb") as file:
                content = yaml.safe_load(file.read(_CONFIG_LIMIT_BYTES))
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
            self.error(f"argument --config: {path} cannot be read: {error}")
        if not isinstance(content, dict):
            self.error(f"argument --config: {path} holds no mapping of flags")
        words: list[str] = []
        for key, value in content.items():
            if key == "disable-cuda-graph":
                self.error(f"argument --config: {key} cannot be set in a file")
            action = self._option_string_actions.get(f"--{key}")
            if action is not None and action.nargs == 0:
                words += [f"--{key}"] if value is True else []
            elif isinstance(value, list):
                words += [f"--{key}", *(str(one) for one in value)]
            else:
                words += [f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value)]
        return words


def _add(parser: argparse.ArgumentParser, option: Option) -> None:
    names = [f"--{name}" for name in option.names]
    if option.kind == "switch":
        parser.add_argument(*names, dest=option.dest, action="store_true", default=option.default)
        return
    if option.kind == "toggle":
        parser.add_argument(
            *names, dest=option.dest, action=argparse.BooleanOptionalAction, default=option.default
        )
        return
    reader = READERS[option.type]
    choices = [reader(choice) for choice in option.choices] or None
    if option.kind == "value":
        parser.add_argument(
            *names,
            dest=option.dest,
            type=reader,
            nargs=option.nargs or None,
            choices=choices,
            default=option.default,
            required=option.name == REQUIRED,
        )
    elif option.kind == "lora":
        parser.add_argument(
            *names, dest=option.dest, nargs=option.nargs, action=_LoraPaths, default=option.default
        )
    else:
        nargs: str | int | None = option.nargs or (None if option.kind == "old-value" else 0)
        parser.add_argument(
            *names,
            dest=option.dest,
            type=reader,
            nargs=None if nargs == "one" else nargs,
            choices=choices,
            default=option.default,
            action=_old_action(option),
        )


class _LoraPaths(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        paths = [str(value).strip() for value in values or ()]
        setattr(namespace, self.dest, [json.loads(path) if path.startswith("{") else path for path in paths])


def _old_action(option: Option) -> type[argparse.Action]:
    class Old(argparse.Action):
        def __call__(
            self,
            parser: argparse.ArgumentParser,
            namespace: argparse.Namespace,
            values: str | Sequence[object] | None,
            option_string: str | None = None,
        ) -> None:
            if option.kind == "old-error":
                parser.error(f"{option_string} is no longer supported{instead_words(option)}")
            # The notice that SGLang prints, in yellow as there.
            sys.stderr.write(
                f"\033[1;33m'{option_string}' is deprecated and will be removed in a future release."
                f"{instead_words(option).replace(': write', ' Use')}\033[0m\n"
            )
            if option.kind == "old-value":
                setattr(namespace, self.dest, values)
            elif option.kind == "old-switch":
                setattr(namespace, self.dest, True)
            elif option.kind == "old-const":
                setattr(namespace, self.dest, option.instead.partition("=")[2] or True)

    return Old

"""What a person wants served, as written in ``profiles/services/*.yaml``.

Values are taken as they are written: text that looks like a number stays text, and the other way round; only
environment variables are text whatever they look like.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from dflash_deploy.engine.sglang.command import Method
from dflash_deploy.yaml_file import describe, like

if TYPE_CHECKING:
    from dflash_deploy.engine.launch import FlagValue


Line = Annotated[str, like(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]{1,4096}", "text of one line")]


def _one_kind(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    # A union tells one error for each of its members; people want one.
    try:
        return validate(value)
    except ValidationError:
        raise ValueError(
            "expected true, false, a number, text of one line, or a list of numbers or of texts, "
            f"found {describe(value)}"
        ) from None


def _absolute(path: Path) -> Path:
    try:
        path = path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path}: there is no such home folder") from error
    if not path.is_absolute():
        raise ValueError(
            f"expected a path from the root (/...) or the home folder (~/...), found {str(path)!r}"
        )
    return path


Scalar = bool | int | float | Line
FlagSetting = Annotated[Scalar | list[int] | list[float] | list[Line], WrapValidator(_one_kind)]


def flag_value(setting: FlagSetting) -> FlagValue:
    """A setting as the engine's commands take it: lists as tuples."""
    if isinstance(setting, list):
        # A list holds one kind of item, and so does the tuple.
        return cast("FlagValue", tuple(setting))
    return setting


def _from_the_root(place: str) -> str:
    """A folder from the root, wherever it was given from; a card's id or a hub name as it is."""
    if place.startswith("~"):
        return str(_absolute(Path(place)))
    return str(Path(place).absolute()) if place.startswith(("./", "../", "/")) else place


Place = Annotated[Line, AfterValidator(_from_the_root)]
"""A folder or a hub name. ``./`` and ``../`` begin where the tool is run."""

AbsolutePath = Annotated[Path, Field(strict=False), AfterValidator(_absolute)]

FlagName = Annotated[
    str,
    like(
        r"[a-z][a-z0-9]*(-[a-z0-9]+)*", "a flag's full name without dashes in front, as mem-fraction-static"
    ),
]

VARIABLE = "env."
"""How the name of a setting begins that is a variable of the server's environment."""
METHOD = "method"
"""The setting that says how draft tokens are made."""

SettingName = Annotated[
    str,
    like(
        r"[a-z][a-z0-9]*(-[a-z0-9]+)*|env\.[A-Za-z_][A-Za-z0-9_]*",
        "a flag's full name without dashes in front, as mem-fraction-static, or env.NAME for a variable of "
        "the server's environment",
    ),
]

EnvName = Annotated[str, like(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable")]


def _as_written(value: object) -> object:
    """A number or a switch as the text that YAML has for it: a variable is always text."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


def _variables_as_written(value: object) -> object:
    """Settings, or what is searched of them, with the values of variables as text."""
    if not isinstance(value, dict):
        return value
    return {
        name: _text_of(one) if isinstance(name, str) and name.startswith(VARIABLE) else one
        for name, one in value.items()
    }


def _text_of(value: object) -> object:
    if isinstance(value, dict) and isinstance(value.get("choices"), list):
        return {**value, "choices": [_as_written(choice) for choice in value["choices"]]}
    return _as_written(value)


EnvValue = Annotated[
    str, BeforeValidator(_as_written), like(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]{0,4096}", "text of one line")
]

Goal = Literal["total_tokens_per_s", "user_tokens_per_s", "latency_s", "context_tokens"]
Limited = Literal[
    "total_tokens_per_s", "user_tokens_per_s", "ttft_p95_s", "latency_s", "context_tokens", "free_vram_mib"
]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Model(_Part):
    """The target model.

    ``target`` is the id of a model card (``profiles/models``), or a folder or hub name, which needs no card.
    ``path`` is what the engine is given (a folder or a hub name) where it is not the card's own.
    """

    target: Place
    path: Place | None = None
    served_name: Line | None = None
    quantization: Line | None = None


class Speculation(_Part):
    """How draft tokens are made.

    ``draft`` and ``draft_path`` are to the draft what ``Model.target`` and ``Model.path`` are to the target.
    A draft inside the target's checkpoint (``mtp``) needs neither. ``drafts`` are those of other methods that
    are tried (``search.method``, ``compare``), where the known one for the target is not wanted.
    """

    method: Method = "none"
    draft: Place | None = None
    draft_path: Place | None = None
    drafts: dict[Literal["dspark", "dflash"], Place] = {}


class Engine(_Part):
    """The engine and the version to write flags for; ``python`` is its interpreter once it is installed."""

    name: Literal["sglang"] = "sglang"
    version: Annotated[str, like(r"[0-9]+(\.[0-9]+)+[0-9A-Za-z.+-]{0,40}", "a version such as 0.5.23")]
    python: AbsolutePath | None = None


class Workload(_Part):
    """Who uses the service, and how: users at once, tokens that each may hold, tokens an answer takes."""

    users: int = Field(ge=1, le=1024)
    context_tokens: int = Field(ge=16)
    output_tokens: int = Field(ge=2)
    tasks: dict[Literal["instruction", "math", "code", "prose"], float] = Field(
        default={"instruction": 1.0}, min_length=1
    )

    @model_validator(mode="after")
    def _weights_and_lengths(self) -> Workload:
        if any(weight < 0 for weight in self.tasks.values()) or not sum(self.tasks.values()):
            raise ValueError("tasks: weights are zero or more, and not all zero")
        if self.output_tokens >= self.context_tokens:
            raise ValueError("output_tokens must be below context_tokens: the prompt needs room too")
        return self


class Limit(_Part):
    """Bounds that a configuration must keep to be taken."""

    min: float | None = None
    max: float | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Limit:
        if self.min is None and self.max is None:
            raise ValueError("give min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError("min is above max")
        return self


class Objective(_Part):
    """The one figure to make best (latency: least, the others: most), within the limits.

    ``also`` are further ones: the search goes on until it knows what each of them can gain, and a study tells
    which trials no other is better than in all of them (the Pareto front). The best is still by ``optimize``.
    """

    optimize: Goal
    also: list[Goal] = Field(default=[], max_length=3)
    constraints: dict[Limited, Limit] = {}


class Range(_Part):
    """Numbers from ``low`` to ``high`` in steps of ``step``."""

    low: int | float
    high: int | float
    step: Annotated[int | float, Field(gt=0)]

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if self.low > self.high:
            raise ValueError("low is above high")
        return self


class Choices(_Part):
    """A list of values, ``null`` standing for "leave the flag out"."""

    choices: list[FlagSetting | None] = Field(min_length=1, max_length=200)


def _bounds_kind(value: object) -> str:
    return (
        "choices"
        if isinstance(value, Choices) or (isinstance(value, dict) and "choices" in value)
        else "range"
    )


Bounds = Annotated[
    Annotated[Range, Tag("range")] | Annotated[Choices, Tag("choices")], Discriminator(_bounds_kind)
]


class KnownSetting(_Part):
    """A setting that somebody tuned by hand: tried first, and the mark to beat.

    Its ``flags`` may name a ``method``, where methods are searched, and variables (``env.NAME``).
    """

    name: Line
    source: Line
    flags: Annotated[dict[SettingName, FlagSetting], BeforeValidator(_variables_as_written)]


class Measure(_Part):
    """How long a trial is measured: rounds after the warm-up rounds.

    ``levels`` are numbers of users at once that are measured besides the workload's, one round each, on the
    same server: they need no launch of their own.

    ``check_output`` is off for a model whose text means nothing, such as one of random weights; the counts of
    its tokens are still checked.
    """

    rounds: int = Field(default=3, ge=1, le=100)
    warm_up: int = Field(default=1, ge=1, le=20)
    levels: list[Annotated[int, Field(ge=1, le=1024)]] = Field(default=[], max_length=16)
    check_output: bool = True


class Notify(_Part):
    """Who is told when the service goes down, is restarted, rolled back, or serves again.

    ``command`` is a program from the root with its arguments; the message stands on its input, as JSON.
    ``url`` gets the same JSON by POST; an address that is a secret itself stands in ``url_file``, a 0600 file
    with that one line. The same kind of message is not sent again within ``every_s`` seconds.
    """

    command: Annotated[list[Line], Field(min_length=1, max_length=50)] | None = None
    url: Annotated[str, like(r"https?://[!-~]{1,2000}", "an address, http(s)://...")] | None = None
    url_file: AbsolutePath | None = None
    every_s: float = Field(default=300.0, ge=0, le=86_400)

    @model_validator(mode="after")
    def _somewhere(self) -> Notify:
        if self.command is None and self.url is None and self.url_file is None:
            raise ValueError("give command, url or url_file")
        if self.url is not None and self.url_file is not None:
            raise ValueError("give url or url_file, not both")
        if self.command is not None and not self.command[0].startswith("/"):
            raise ValueError(f"command: expected a program from the root (/...), found {self.command[0]!r}")
        return self


class Service(_Part):
    """The service that comes out at the end.

    ``api_key_file`` is a 0600 YAML file holding one line, ``api-key: …``: the form in which the engine reads
    it without the key ever standing in a command line. An address that others can reach demands it.
    """

    name: Annotated[str, like(r"[a-z0-9][a-z0-9-]{0,62}", "lower-case letters, digits and dashes")]
    host: Annotated[str, like(r"[0-9A-Za-z.:_-]{1,253}", "an address or host name")] = "127.0.0.1"
    port: int = Field(default=30000, ge=1, le=65535)
    api_key_file: AbsolutePath | None = None
    user: Annotated[str, like(r"[a-z_][a-z0-9_-]{0,31}", "a user's name")] | None = None
    notify: Notify | None = None


class Profile(_Part):
    """One service to tune and run."""

    summary: Line
    card: Line | None = None
    model: Model
    speculation: Speculation = Speculation()
    engine: Engine
    workload: Workload
    objective: Objective
    flags: dict[FlagName, FlagSetting] = {}
    env: dict[EnvName, EnvValue] = {}
    search: Annotated[dict[SettingName, Bounds], BeforeValidator(_variables_as_written)]
    known: list[KnownSetting] = []
    measure: Measure = Measure()
    service: Service

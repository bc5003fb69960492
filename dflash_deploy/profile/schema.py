"""What a person wants served, as written in ``profiles/services/*.yaml``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Scalar = bool | int | float | str
FlagSetting = Scalar | list[int] | list[float] | list[str]

FlagName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9]*(-[a-z0-9]+)*$")]
"""An engine flag by its full name, without dashes in front."""

EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]

Goal = Literal["total_tokens_per_s", "user_tokens_per_s", "latency_s", "context_tokens"]
Limited = Literal[
    "total_tokens_per_s", "user_tokens_per_s", "ttft_p95_s", "latency_s", "context_tokens", "free_vram_mib"
]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(_Part):
    """The target model.

    ``target`` names a model card (``profiles/models``); ``path`` is what the engine is given (a folder or a
    hub name) where it is not the card's own.
    """

    target: str
    path: str | None = None
    served_name: str | None = None
    quantization: str | None = None


class Speculation(_Part):
    """How draft tokens are made. ``draft`` names a model card, as ``Model.target`` does."""

    method: Literal["none", "ngram", "mtp", "dspark", "dflash"] = "none"
    draft: str | None = None
    draft_path: str | None = None


class Engine(_Part):
    """The engine and the version to write flags for; ``python`` is its interpreter once it is installed."""

    name: Literal["sglang"] = "sglang"
    version: str
    python: Path | None = None


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
    """The one figure to make best (latency: least, the others: most), within the limits."""

    optimize: Goal
    constraints: dict[Limited, Limit] = {}


class Range(_Part):
    """Numbers from ``low`` to ``high`` in steps of ``step``."""

    low: float
    high: float
    step: float = Field(gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if self.low > self.high:
            raise ValueError("low is above high")
        return self


class Choices(_Part):
    """A list of values, ``null`` standing for "leave the flag out"."""

    choices: list[FlagSetting | None] = Field(min_length=1)


class KnownSetting(_Part):
    """A setting that somebody tuned by hand: tried first, and the mark to beat."""

    name: str
    source: str
    flags: dict[FlagName, FlagSetting]


class Measure(_Part):
    """How long a trial is measured: rounds after the warm-up rounds."""

    rounds: int = Field(default=3, ge=1, le=100)
    warm_up: int = Field(default=1, ge=1, le=20)


class Service(_Part):
    """The service that comes out at the end.

    ``api_key_file`` is a 0600 YAML file holding one line, ``api-key: …``: the form in which the engine reads
    it without the key ever standing in a command line. An address that others can reach demands it.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
    host: str = "127.0.0.1"
    port: int = Field(default=30000, ge=1, le=65535)
    api_key_file: Path | None = None
    user: Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_-]{0,31}$")] | None = None


class Profile(_Part):
    """One service to tune and run."""

    summary: str
    card: str | None = None
    model: Model
    speculation: Speculation = Speculation()
    engine: Engine
    workload: Workload
    objective: Objective
    flags: dict[FlagName, FlagSetting] = {}
    env: dict[EnvName, str] = {}
    search: dict[FlagName, Range | Choices]
    known: list[KnownSetting] = []
    measure: Measure = Measure()
    service: Service

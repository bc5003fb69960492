"""Result files: what was measured, where and with what, in a form that two people can compare.

Whatever is read here was written by somebody else: sizes are bounded, every value is checked, unknown keys
are refused.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from codecs import BOM_UTF8
from collections.abc import Sequence
from datetime import UTC
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from dflash_deploy.bench.quality.exam import Kind, Mode
from dflash_deploy.bench.workloads import Prompt
from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import check_place, read_regular, write_atomic
from dflash_deploy.json_file import first_mistake, refuse_newer

SCHEMA_VERSION: Literal[1] = 1
_LARGEST_BYTES = 32 << 20

Outcome = Literal["served", "failed", "unfit", "unstable"]
"""served: all well. failed: it did not start. unfit: its answers are wrong. unstable: it broke under load."""


def _utc(moment: AwareDatetime) -> AwareDatetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError("there is no such moment") from None


def _without_surrogates(value: object) -> object:
    """What a command line or a server may hold, and no file."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


Text = Annotated[str, BeforeValidator(_without_surrogates), Field(max_length=4096)]
Count = Annotated[int, Field(ge=0, le=1 << 53)]
Figure = Annotated[float, Field(ge=0, le=1e30)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Machine(_Part):
    """Where the server ran; None for what is not known, as of a server elsewhere.

    Attributes:
        card: id of the known card, such as ``rtx-5090``.
        gpu: name that the driver gives.
    """

    card: Text | None = None
    gpu: Text | None = None
    memory_mib: Count | None = None
    driver: Text | None = None
    cpu: Text | None = None
    ram_mib: Count | None = None
    kernel: Text | None = None


class Workload(_Part):
    """What was asked.

    Attributes:
        protocol: its name.
        tasks: weight of each task's prompts; empty for a person's own file.
        output_tokens: of each answer, exactly as far as the server can.
        arrivals: how requests come: ``closed`` (a user waits for the answer) or the rate of an open loop.
        sha256: of everything that makes a request: prompts, lengths, sampling. Only results of one workload
            can be compared.
    """

    protocol: Text
    tasks: dict[Text, Figure] = {}
    output_tokens: Count
    arrivals: Text = "closed"
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class UserRow(_Part):
    """One request.

    Attributes:
        tokens_per_s: decode speed, after the first arrival until the last; None where all came at once.
        wall_s: from sending to the end of the answer.
        digest: stands for the answer's text.
        estimated: the server does not count, so a chunk was taken for a token: there were as many or more.
    """

    user: Count
    prompt_tokens: Count
    output_tokens: Count
    ttft_s: Figure
    tokens_per_s: Figure | None
    wall_s: Figure
    accept_length: Figure | None = None
    digest: Text | None = None
    estimated: bool = False


class RoundRow(_Part):
    """One round: all its users.

    Attributes:
        name: ``cold`` for the first after a start, ``1``, ``2`` … for those that count.
        counts: enters the medians.
        tokens_per_s: of all users over the round's wall time.
        user_tokens_per_s: median of its users' decode speeds; None where no answer tells one.
    """

    name: Text
    counts: bool = True
    tokens_per_s: Figure
    user_tokens_per_s: Figure | None
    ttft_s: Figure
    wall_s: Figure
    users: list[UserRow] = Field(max_length=100_000)


class Tail(_Part):
    """A figure over many requests or tokens, in seconds."""

    median: Figure
    p95: Figure
    p99: Figure


Tailed = Literal["ttft_s", "inter_token_s", "latency_s", "waited_s"]


class LoadRows(_Part):
    """One load level: so many users, in rounds.

    Attributes:
        label: of a level that stands for itself, such as ``8 users`` or ``minute 3``; None for rounds.
        window: part of the load before it, whose requests are not told again.
        prompt_tokens: of each prompt, where the protocol sets them. ``prefill_tokens_per_s``: at that length.
        tails: of the rounds that count: time to the first token, from token to token, to the end of the
            answer, and from the moment at which a request was due until it was sent.
    """

    users: Count
    label: Text | None = None
    window: bool = False
    rounds: list[RoundRow] = Field(max_length=4096)
    tails: dict[Tailed, Tail] = {}
    prompt_tokens: Count | None = None
    prefill_tokens_per_s: Figure | None = None

    @property
    def counted(self) -> list[RoundRow]:
        """The rounds that enter the medians."""
        return [one for one in self.rounds if one.counts]


class ServerRow(_Part):
    """The server's own view of the load; None for what it does not say.

    Attributes:
        queue_s: mean time that a request waited.
        retracted: requests put back into the queue for lack of memory. ``aborted``: given up.
    """

    queue_s: Figure | None
    generated_tokens: Count | None
    cached_tokens: Count | None
    retracted: Count | None
    aborted: Count | None


class GpuRow(_Part):
    """The card under the load: medians, but for the highest temperature.

    Attributes:
        throttled: share of the looks in which heat or the power supply held it back.
        clock_reasons: share of the looks in which each reason set the clocks.
    """

    clock_sm_mhz: Figure | None
    power_w: Figure | None
    temperature_c: Figure | None
    throttled: Figure
    clock_reasons: dict[Text, Figure] = {}


class Failure(_Part):
    """Requests that failed in one way: how many, and one of them in words."""

    kind: Text
    count: Count
    example: Text


class AgreementRow(_Part):
    """How far answers agree with plain decoding's, as ``agreement.Agreement`` has it."""

    prompts: Count
    identical: Count
    diverge_after: Figure | None
    counted: bool


class Quality(_Part):
    """What the examination came to.

    Attributes:
        asked: questions with known answers, by kind. ``right``: those answered right.
        missed: why an answer is wrong, by the question's id.
        faults: what makes the server unfit, with an example each; empty where all is well.
        repeated: prompts asked three times. ``repeated_same``: those with one answer to the last byte.
        digests: stand for the texts, by how they were asked and by the prompt's id.
        agreement: with plain decoding, by how they were asked; None where there was none to compare.
    """

    asked: dict[Kind, Count] = {}
    right: dict[Kind, Count] = {}
    missed: dict[Text, Text] = Field(default={}, max_length=1000)
    faults: list[Text] = Field(default=[], max_length=1000)
    repeated: Count = 0
    repeated_same: Count = 0
    cached_tokens: Count | None = None
    digests: dict[Mode, dict[Text, Text]] = {}
    agreement: dict[Mode, AgreementRow] | None = None


class Run(_Part):
    """One server under one workload.

    Attributes:
        name: ``bench``, or the method of ``compare``.
        repeat: counts the launches of one method, from 1.
        url: of the server, where it was not launched for this run.
        flags: it was launched with, None where that is not known.
        notes: what a reader of the figures must know.
    """

    name: Text
    repeat: Annotated[int, Field(ge=1, le=1000)] = 1
    outcome: Outcome
    reason: Text | None = None
    url: Text | None = None
    model: Text | None = None
    engine: Text | None = None
    engine_version: Text | None = None
    flags: dict[Text, bool | int | float | Text | list[int] | list[float] | list[Text]] | None = None
    boot_s: Figure | None = None
    loads: list[LoadRows] = Field(default=[], max_length=4096)
    failures: list[Failure] = Field(default=[], max_length=256)
    notes: list[Text] = Field(default=[], max_length=256)
    server: ServerRow | None = None
    gpu: GpuRow | None = None
    quality: Quality | None = None
    accept_length: Figure | None = None
    vram_used_mib: Count | None = None
    vram_total_mib: Count | None = None


class ResultFile(_Part):
    """One person's measurements. ``kind`` holds for every figure in it.

    Attributes:
        interrupted: it was cut short; what had been measured until then is in it.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    tool_version: Text
    created: Annotated[AwareDatetime, AfterValidator(_utc)]
    kind: Literal["measured", "simulated"]
    redacted: bool = False
    interrupted: bool = False
    machine: Machine | None = None
    workload: Workload
    runs: list[Run] = Field(max_length=1000)


def workload_hash(prompts: Sequence[Prompt], **settings: object) -> str:
    """Stands for everything that makes a request.

    Args:
        prompts: in the order in which they are asked.
        settings: lengths, sampling, users and whatever else decides what is asked.
    """
    asked = [
        {
            "messages": [[message.role, message.content] for message in one.messages],
            "tool": one.tool,
            **({} if one.output_tokens is None else {"max_tokens": one.output_tokens}),
        }
        for one in prompts
    ]
    text = json.dumps({"prompts": asked, **settings}, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def digest(text: str) -> str:
    """Stands for an answer, as ``agreement.Said.digest`` does."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def check_writable(path: Path) -> None:
    """See that a result file can be written before an hour is spent on it.

    Raises:
        OSError: it cannot.
    """
    check_place(path)
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def write_result(path: Path, result: ResultFile) -> None:
    """Write a result file in one step."""
    write_atomic(path, result.model_dump_json(indent=2) + "\n")


def read_result(path: Path) -> ResultFile:
    """Read a file that anybody may have written.

    Raises:
        DeployError: there is none, it is no result file, or a newer version of the tool wrote it.
    """
    try:
        written = read_regular(path, most_bytes=_LARGEST_BYTES)
    except FileNotFoundError:
        raise DeployError(f"no result file {path}", exit_code=ExitCode.MISSING) from None
    except OSError as error:
        why = error.strerror or str(error)
        raise DeployError(f"{path} cannot be read: {why}", exit_code=ExitCode.INVALID_INPUT) from error
    try:
        return ResultFile.model_validate_json(written.removeprefix(BOM_UTF8))
    except ValidationError as error:
        refuse_newer(path, written, reads=SCHEMA_VERSION, what="result files", fix="install that version")
        why = first_mistake(error)
    raise DeployError(
        f"{path} is no result file: {why}",
        fix="dflash-deploy bench URL --out FILE writes one; dflash-deploy bench schema prints their form",
        exit_code=ExitCode.INVALID_INPUT,
    )

"""Where the workers of a study meet: an address without a secret in it."""

from __future__ import annotations

import importlib.util
import re
import socket
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_deploy.errors import DeployError, ExitCode
from dflash_deploy.files import read_regular, write_atomic

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

_FILE = "shared.json"
_LARGEST_BYTES = 1 << 16
_CONNECT_S = 10
BEAT_S = 10.0
_WHERE_TO_WRITE_IT = (
    "write it into ~/.pgpass or a file that PGPASSFILE names (HOST:PORT:DATABASE:USER:PASSWORD, mode 0600), "
    "or set PGPASSWORD, and leave it out of the address"
)


class Meeting(BaseModel):
    """One worker's way to a shared study.

    Attributes:
        storage: address of the storage, without a password.
        study: its name there.
        worker: this worker's name, unlike all others'.
        beat_s: how often it shows that it lives.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    storage: str
    study: str
    worker: str
    beat_s: float = BEAT_S

    @property
    def folder_name(self) -> str:
        """What this worker's own study is called on its machine."""
        return f"{self.study}.{self.worker}"

    def keep(self, folder: Path) -> None:
        """Write it beside the study, so that the worker finds back."""
        write_atomic(folder / _FILE, self.model_dump_json(indent=2) + "\n")

    def open(self) -> BaseStorage:
        """The storage.

        Raises:
            DeployError: its client is not installed, or it cannot be reached.
        """
        from optuna.exceptions import ExperimentalWarning  # noqa: PLC0415
        from optuna.storages import GrpcStorageProxy, RDBStorage  # noqa: PLC0415
        from sqlalchemy.engine import make_url  # noqa: PLC0415

        if self.storage.startswith("grpc://"):
            _require("grpc", "grpc")
            host, _, port = self.storage.removeprefix("grpc://").strip("/").rpartition(":")
            with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
                storage = GrpcStorageProxy(host=host.strip("[]"), port=int(port))
            try:
                storage.wait_server_ready(timeout=_CONNECT_S)
            except Exception as error:
                raise self.unreachable(error) from error
            return storage
        url = make_url(self.storage)
        if url.get_backend_name() == "postgresql":
            _require("psycopg", "postgres")
            # A database may have been made without an encoding, and would then answer in bytes.
            url = url.set(drivername="postgresql+psycopg").update_query_dict({"client_encoding": "utf8"})
        address = url.render_as_string(hide_password=False)
        problem: Exception | None = None
        # Of workers that make the tables at the same moment one succeeds; the others find them soon after.
        for pause_s in (0.0, 0.5, 2.0):
            time.sleep(pause_s)
            try:
                return RDBStorage(address, engine_kwargs={"pool_pre_ping": True})
            except Exception as error:  # noqa: BLE001  (of the database's client, whichever it is)
                problem = error
        assert problem is not None  # noqa: S101  (there was a try)
        raise self.unreachable(problem) from problem

    def troubles(self) -> tuple[type[Exception], ...]:
        """What the storage raises when it cannot be reached or does not do what it is asked."""
        from optuna.exceptions import StorageInternalError  # noqa: PLC0415
        from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415

        usual = (StorageInternalError, SQLAlchemyError, OSError)
        if not self.storage.startswith("grpc://"):
            return usual
        from grpc import RpcError  # noqa: PLC0415

        return (*usual, RpcError)

    def unreachable(self, error: BaseException) -> DeployError:
        """The storage does not answer: in words."""
        cause = error.__cause__ or error
        words = str(getattr(cause, "orig", None) or cause).strip().splitlines() or [type(error).__name__]
        return DeployError(
            f"the storage {self.storage} cannot be used: {words[0]}",
            fix="start it, mend the address or the rights, or see to the password (PGPASSFILE); what has "
            f"ended is kept, and dflash-deploy tune --resume {self.folder_name} goes on",
            exit_code=ExitCode.UNAVAILABLE,
        )


def meet(storage: str, study: str, worker: str | None, gpu: int | None, *, beat_s: float = BEAT_S) -> Meeting:
    """A worker's way to a study.

    Args:
        storage: ``postgresql://USER@HOST/DATABASE``, ``grpc://HOST:PORT``, or ``sqlite:///FILE`` for workers
            on one machine.
        study: its name in the storage.
        worker: None for one made of the machine's name and the card's number.
        gpu: number of the card that it uses, None where it was not chosen.
        beat_s: how often it shows that it lives; the same for all workers.

    Raises:
        DeployError: no such kind of storage, or there is a password in the address.
    """
    _require_address(storage)
    if worker is None:
        host = re.sub("[^A-Za-z0-9-]+", "-", socket.gethostname()).strip("-") or "worker"
        worker = host if gpu is None else f"{host}-gpu{gpu}"
    return Meeting(storage=storage, study=study, worker=worker, beat_s=beat_s)


def read_meeting(folder: Path) -> Meeting | None:
    """The way that a worker has gone before; None for a study of its own.

    Raises:
        DeployError: it is no address any more that this tool takes.
    """
    try:
        written = read_regular(folder / _FILE, most_bytes=_LARGEST_BYTES)
    except FileNotFoundError:
        return None
    try:
        meeting = Meeting.model_validate_json(written)
    except ValidationError as error:
        raise DeployError(
            f"{folder / _FILE} is no record that this tool reads",
            fix="join again: dflash-deploy tune … --storage … --name …",
            exit_code=ExitCode.INVALID_INPUT,
        ) from error
    _require_address(meeting.storage)
    return meeting


def _require_address(storage: str) -> None:
    from sqlalchemy.engine import make_url  # noqa: PLC0415
    from sqlalchemy.exc import ArgumentError  # noqa: PLC0415

    proxy = re.fullmatch(r"grpc://(\[[0-9a-fA-F:]+\]|[0-9A-Za-z._-]+):\d{1,5}/?", storage)
    if proxy is not None:
        return
    try:
        url = make_url(storage)
        backend = url.get_backend_name()
    except (ArgumentError, ValueError):
        backend = ""
    if backend not in ("postgresql", "sqlite"):
        raise DeployError(
            "a storage is given as postgresql://USER@HOST/DATABASE, grpc://HOST:PORT or sqlite:///FILE",
            exit_code=ExitCode.USAGE,
        )
    # A command line can be read by everybody on the machine, and what is kept of it by more.
    if url.password is not None or any("pass" in name.lower() for name in url.query):
        raise DeployError(
            "there is a password in the storage's address, where others can read it",
            fix=_WHERE_TO_WRITE_IT,
            exit_code=ExitCode.USAGE,
        )


def _require(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise DeployError(
            f"the client of such a storage is not installed ({module})",
            fix=f"pip install 'dflash-deploy[{extra}]'",
            exit_code=ExitCode.MISSING,
        )

"""Servers whose tool has died: found by their records, ended by identity."""

from __future__ import annotations

from dflash_deploy.server.processes import Identity, alive, boot_id, end, members, pid_namespace
from dflash_deploy.server.records import ServerRecord, read_records, remove_record
from dflash_deploy.server.shared_memory import held_by, remove_leftovers
from dflash_deploy.server.temp_dir import remove_temp_dir

_NOBODY = Identity(0, 0)


def end_orphans() -> tuple[str, ...]:
    """End every server that an earlier run of the tool left behind, and remove what it left on disk.

    A server whose tool still runs is not touched; nor is a process that only has the number of one of ours;
    nor anything recorded in another container, whose processes cannot be seen from here.

    Returns:
        One sentence for each server that was still running.
    """
    sentences = []
    for record in read_records():
        same_boot = record.boot_id == boot_id()
        if same_boot and (record.pid_namespace != pid_namespace() or alive(record.tool)):
            continue
        stubborn = False
        if same_boot:
            main = record.server or _NOBODY
            segments = set(record.segments)
            if family := members(main, record.token, record.children):
                segments |= held_by(one.pid for one in family)
                left = end(main, record.token, record.children)
                stubborn = bool(left)
                sentences.append("; ".join((_describe(record), *left)))
            remove_leftovers(segments)
        if not stubborn:
            remove_temp_dir(record.temp_dir, record.token)
            remove_record(record.token)
    return tuple(sentences)


def _describe(record: ServerRecord) -> str:
    process = f"process {record.server.pid}" if record.server else "just started"
    return (
        f"ended a server that an earlier run left on port {record.port} ({process}, log in {record.run_dir})"
    )

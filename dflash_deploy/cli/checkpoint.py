"""``dflash-deploy checkpoint``: checkpoints made from checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(
    help="Make a checkpoint that serves better from one that is there.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def _options() -> None: ...


@app.command("dense-head")
def dense_head(
    source: Annotated[Path, typer.Argument(help="Folder of a checkpoint whose lm_head is in NVFP4.")],
    destination: Annotated[Path, typer.Argument(help="Folder to make; the other files are linked into it.")],
    *,
    reference: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Checkpoint with the same head, dense: told apart by it, and checked."
        ),
    ] = None,
    nibble_order: Annotated[
        Literal["low-first", "high-first"] | None,
        typer.Option(
            help="Which half of a byte comes first [default: low, as ModelOpt packs; or by reference]."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be made, and stop.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object (docs/json.md lists its keys).")
    ] = False,
) -> None:
    """Make the output head BF16, for a DFlash2 selector that refuses a quantised one.

    No code is changed. It takes about 1.7 GiB more VRAM for a vocabulary of 248,320; what was cut short is
    gone on with. Progress goes to standard error.
    """
    from json import dumps

    from dflash_deploy.checkpoint.safetensors import size_text
    from dflash_deploy.checkpoint_tools.dense_head import look, make
    from dflash_deploy.tune.signals import stop_once

    plan = look(source, order=nibble_order, reference=reference)
    head = plan.source.head
    if not json:
        typer.echo(f"{head.module}: {head.rows:,} x {head.columns:,} in NVFP4, {plan.order}")
        if plan.cosine is not None:
            typer.echo(f"like the reference's: cosine {plan.cosine:.4f} (measured, on sampled rows)")
        for name, size in plan.written:
            typer.echo(f"to be written: {name}, {size_text(size)}")
        typer.echo(f"VRAM: {plan.more_vram_bytes / (1 << 30):.2f} GiB more for the head (predicted)")
    if not dry_run:
        with stop_once():
            make(plan, destination, say=lambda line: typer.echo(line, err=True))
    if json:
        made = None if dry_run else str(destination.absolute())
        typer.echo(dumps({"schema_version": 1, "made": made, **plan.as_json()}, indent=2))

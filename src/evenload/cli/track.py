"""`evenload track`: run a script, unchanged, and record what it allocates."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from evenload.cli._shared import ForceFlag, JsonFlag, remark, say, say_json, warn
from evenload.errors import EvenloadError
from evenload.ledger.curve import peaks
from evenload.ledger.files import read_ledger
from evenload.record import require_torch
from evenload.units import human_bytes


def track(
    script: Annotated[str, typer.Argument(help="Python script to run; with -m, a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its own arguments, as they are.")] = None,
    *,
    module: Annotated[bool, typer.Option("--module", "-m", help="Run a module, as python -m does.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Ledger to write; by default the script's name with .ledger.")
    ] = None,
    stacks: Annotated[bool, typer.Option("--stacks", help="Note the Python line behind every allocation.")] = False,
    synchronize: Annotated[
        bool, typer.Option("--synchronize", help="Wait for the device after every operator, so that lines are true.")
    ] = False,
    owners: Annotated[
        bool, typer.Option("--owners", help="Look up who holds what is dead at the peak, once, in the third step.")
    ] = False,
    audit: Annotated[
        bool, typer.Option("--audit", help="Say what custom autograd functions keep, and what their backward reads.")
    ] = False,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Run a script, unchanged, and record every allocation into a ledger.

    Words after the script are its own, and so are what it prints, how it fails and its exit code.

    Under torchrun every rank writes a ledger of its own: torchrun ... -m evenload track train.py.

    The ledger is readable up to the last operator even when the script is killed.
    """
    words = tuple(arguments or ())
    name = ledger_path(script if out is None else str(out), given=out is not None)
    path = Path.cwd() / name  # the script may go to another folder

    require_torch()
    from evenload.record.audit import Audit, audit_functions  # noqa: PLC0415  # imports torch
    from evenload.record.recorder import record  # noqa: PLC0415
    from evenload.record.script import run_script  # noqa: PLC0415

    recorder = record(
        path=path, force=force, stacks=stacks, synchronize=synchronize, owners=owners, command=(script, *words)
    )
    process = os.getpid()
    with audit_functions() if audit else nullcontext(Audit()) as seen:
        code = run_script(recorder, script, words, module=module)
    if os.getpid() != process:  # a child of the script, at the end of it: the ledger is its parent's
        raise typer.Exit(code)
    try:
        ledger = read_ledger(path)
    except EvenloadError as error:  # the script is not to blame
        warn(recorder.notices)
        remark(f"warning: there is no ledger to read: {error}")
        raise typer.Exit(code) from None
    warn(recorder.notices or ledger.notices)
    found = peaks(ledger)
    if as_json:
        say_json(
            {"ledger": str(name), "allocations": len(ledger.allocations), "device": ledger.device, "peaks": found}
            | ({"functions": seen.functions} if audit else {})
        )
    elif audit:
        say(str(seen))
    remark(
        f"wrote {name}: {len(ledger.allocations)} allocations, peak {human_bytes(found.held)} on {ledger.device}"
        f" ({human_bytes(found.needed)} needed)\n  next: evenload report {name}"
    )
    raise typer.Exit(code)


def ledger_path(name: str, *, given: bool) -> Path:
    """File of this process's ledger: `train.py` gives `train.ledger`, and `train.rank3.ledger` in a group of processes.

    Args:
        name: script, module, or the name that was asked for.
        given: it is the name that was asked for.
    """
    path = Path(name) if given else Path(f"{Path(name).name.removesuffix('.py') or 'script'}.ledger")
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not (rank.isdecimal() and world.isdecimal() and int(world) > 1):
        return path
    return path.with_name(f"{path.stem}.rank{int(rank)}{path.suffix}")

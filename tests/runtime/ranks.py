"""What several processes do together; each case returns plain values that the tests look at.

All cases run in one set of processes, because starting one takes seconds.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.runtime import cases
from torch import distributed


def main(rank: int, world: int, folder: str) -> None:
    """One process: run everything and leave the results in a file."""
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", world)
    distributed.init_process_group("gloo", rank=rank, world_size=world, store=store)
    results: dict[str, Any] = {}
    for name, run in cases.CASES[world].items():
        results[name] = attempt(run)
    torch.save(results, Path(folder) / f"results{rank}.pt")
    distributed.destroy_process_group()


def attempt(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception:  # noqa: BLE001  # the other ranks go on too
        return traceback.format_exc()

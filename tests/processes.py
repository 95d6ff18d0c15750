"""Processes on gloo that run scenarios together. Starting one takes seconds, so all scenarios run in one set."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

Scenario = Callable[[], Any]
"""Runs on every rank, and returns plain values."""


def run_all(rank: int, world: int, folder: str, scenarios: Mapping[str, Scenario]) -> None:
    """One process: run everything and leave the results in a file."""
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", world)
    distributed.init_process_group("gloo", rank=rank, world_size=world, store=store)
    results: dict[str, Any] = {}
    for name, run in scenarios.items():
        try:
            results[name] = run()
        except Exception:  # noqa: BLE001  # the other ranks would wait for ever: all must go on
            results[name] = traceback.format_exc()
    torch.save(results, Path(folder) / f"results{rank}.pt")
    distributed.destroy_process_group()


def together(main: Callable[..., None], world: int, folder: Path, *args: Any, limit: float) -> list[dict[str, Any]]:
    """Start a process for every rank, wait for all, and give what each of them found, by scenario.

    Args:
        main: run in every process, with its rank and what follows here; it leaves what `run_all` leaves.
        world: how many processes.
        folder: an empty one.
        args: for `main`, after the rank.
        limit: seconds after which they have failed.
    """
    processes = torch.multiprocessing.spawn(main, args, nprocs=world, join=False)
    try:
        latest = time.monotonic() + limit
        while not processes.join(timeout=5):  # it returns as soon as one of them has come to its end
            if time.monotonic() > latest:
                pytest.fail("the ranks did not come to an end")
    finally:
        for process in processes.processes:
            if process.is_alive():
                process.terminate()
    return [torch.load(folder / f"results{rank}.pt", weights_only=False) for rank in range(world)]


def by_scenario(results: list[dict[str, Any]]) -> Callable[[str], list[Any]]:
    """What a scenario found on each rank, as a function of its name; where it failed, the test fails."""

    def found(name: str) -> list[Any]:
        for one in results:
            if isinstance(one[name], str):
                pytest.fail(one[name])
        return [one[name] for one in results]

    return found

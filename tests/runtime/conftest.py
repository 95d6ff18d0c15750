from __future__ import annotations

import time

import pytest
import torch
from tests.runtime import pair


@pytest.fixture(scope="session")
def both(tmp_path_factory):
    """What a scenario of `pair` found, on both ranks."""
    folder = tmp_path_factory.mktemp("pair")
    processes = torch.multiprocessing.spawn(pair.main, (str(folder),), nprocs=pair.RANKS, join=False)
    try:
        latest = time.monotonic() + 300
        while not processes.join(timeout=5):  # returns when one of them ends
            if time.monotonic() > latest:
                pytest.fail("the ranks did not come to an end")
    finally:
        for process in processes.processes:
            if process.is_alive():
                process.terminate()
    results = [torch.load(folder / f"results{rank}.pt", weights_only=False) for rank in range(pair.RANKS)]

    def found(name):
        for one in results:
            if isinstance(one[name], str):
                pytest.fail(one[name])
        return [one[name] for one in results]

    return found

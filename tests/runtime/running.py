"""Runs `evenload train` in processes of their own, as torchrun would start them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import evenload

LIMIT = 240
"""Seconds after which a run hangs."""
SOURCE = Path(evenload.__file__).parents[1]
CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SETUP = {"micro_batch": 1, "micro_batches": 2, "seq": 32, "dtype": "fp32", "schedule": "1f1b"}
TEXT = "the quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs. " * 60


def write_plan(folder: Path, table: list, name: str = "plan.yaml", *, policy: str = "{}", **changes: Any) -> Path:
    """A plan, the model that it is for, and something to read."""
    rows = table if isinstance(table[0], list) else [table]
    layers = sum(map(sum, rows))
    setup = {**SETUP, "pp": len(rows[0]), "interleave": len(rows), **changes}
    model = folder / f"model-{layers}.json"
    model.write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    (folder / "text.txt").write_text(TEXT)
    path = folder / name
    path.write_text(
        f"evenload: 1\nmodel: {model.name}\nsetup: {json.dumps(setup)}\nlayout: {json.dumps(rows)}\npolicy: {policy}\n"
    )
    return path


class Run:
    """The processes of one run."""

    def __init__(self, world: int, folder: Path, *arguments: Any, started: int | None = None, **env: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.outputs: list[str] = []
        self.codes: list[int] = []
        self.processes: list[subprocess.Popen[str]] = []
        for rank in range(world if started is None else started):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            if world > 1:
                place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "evenload", "train", *map(str, arguments)],
                    cwd=folder,
                    env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **place, **env},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )

    def wait(self, limit: float = LIMIT) -> Run:
        """Until all have ended; those that have not by then are killed, and their code is -9."""
        end = time.monotonic() + limit
        for process in self.processes:
            try:
                out, _ = process.communicate(timeout=max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                out, _ = process.communicate()
            self.outputs.append(out)
            self.codes.append(process.returncode)
        return self


def losses(path: Path) -> dict[int, float]:
    """Step -> loss, of a log file; the last line counts where a run was resumed."""
    lines = map(json.loads, path.read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


def wait_for(path: Path, text: str, limit: float = LIMIT) -> None:
    """Until a file has a text in it."""
    end = time.monotonic() + limit
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < end, f"{path.name} never said {text!r}"
        time.sleep(0.05)

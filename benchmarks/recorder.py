"""What recording costs: `python benchmarks/recorder.py [--json] [--rounds N]`.

Training steps of a Llama-style model of 8 layers, width 256, on 2 x 256 tokens on the CPU: plain, recorded, recorded
with Python lines, and under PyTorch's own `MemTracker`. Times are of the processor, on one thread, so that others on
the machine do not count. Every round times all of them, one after the other; a ratio is the median over the rounds of
recorded / plain in the same round. The second table is what a million events cost in a process of their own.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import evenload
from evenload.ledger.files import read_ledger, write_ledger

TOKENS = (2, 256)
STEPS = 3
LIMITS = {"recorded": 1.5, "recorded, with lines": 2.0}
"""What a recorded step may cost, in plain steps."""


def training() -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A model, its optimizer, and one training step."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8, "vocab_size": 8192}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=4, use_cache=False, **sizes))
    adamw = torch.optim.AdamW(model.parameters())
    batch = torch.randint(0, 8192, TOKENS)

    def step() -> None:
        model(input_ids=batch, labels=batch).loss.backward()
        adamw.step()
        adamw.zero_grad()

    return model, adamw, step


@contextmanager
def mem_tracker(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """PyTorch's own tracker, which keeps peaks per module and no events."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        yield tracker


def seconds(step: Callable[[], None], around: AbstractContextManager[Any]) -> float:
    """Processor time of one step inside `around`, after one to warm up; entering and leaving do not count."""
    with around as tool:
        step()
        begin = time.process_time()
        for _ in range(STEPS):
            if hasattr(tool, "reset_mod_stats"):
                tool.reset_mod_stats()
            step()
        return (time.process_time() - begin) / STEPS


def overhead(rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of a step and its ratio to the plain step."""
    model, adamw, step = training()
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "plain": nullcontext,
        "recorded": lambda: evenload.record(model=model, optimizer=adamw),
        "recorded, with lines": lambda: evenload.record(model=model, optimizer=adamw, stacks=True),
        "MemTracker": lambda: mem_tracker(model, adamw),
    }
    for way in ways.values():
        seconds(step, way())
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            gc.collect()
            times[name].append(seconds(step, way()))
    ratios = {name: [one / plain for one, plain in zip(times[name], times["plain"], strict=True)] for name in ways}
    return {
        name: {"seconds": min(times[name]), "ratio": statistics.median(ratios[name]), "limit": LIMITS.get(name, 0.0)}
        for name in ways
    }


def million() -> dict[str, float]:
    """Recording, writing and reading half a million allocations and as many frees."""
    with tempfile.TemporaryDirectory() as folder:
        recorded, copied = Path(folder) / "recorded.ledger", Path(folder) / "copied.ledger"
        torch.ones(1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begin = time.perf_counter()
        with evenload.record(path=recorded):
            for _ in range(500_000):
                torch.ones(1)
        record = time.perf_counter() - begin
        begin = time.perf_counter()
        ledger = read_ledger(recorded)
        read = time.perf_counter() - begin
        begin = time.perf_counter()
        write_ledger(copied, ledger)
        write = time.perf_counter() - begin
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        allocations = len(ledger.allocations)
        return {
            "events": 2 * allocations,
            "file MB": recorded.stat().st_size / 1e6,
            "memory MB": grown * 1024 / 1e6,
            "record us per event": record / (2 * allocations) * 1e6,
            "read seconds": read,
            "write seconds": write,
        }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--million", action="store_true", help="only the second table, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.million:
        print(json.dumps(million()))
        return
    alone = subprocess.run([sys.executable, __file__, "--million"], capture_output=True, text=True, check=True)
    answer = {"step": overhead(options.rounds), "million": json.loads(alone.stdout)}
    if options.json:
        print(json.dumps(answer, indent=2))
        return
    print(f"{'step':24}{'seconds':>10}{'x plain':>10}{'allowed':>10}")
    for name, row in answer["step"].items():
        allowed = f"{row['limit']:.1f}" if row["limit"] else "-"
        print(f"{name:24}{row['seconds']:10.3f}{row['ratio']:10.2f}{allowed:>10}")
    print()
    for name, value in answer["million"].items():
        print(f"{name:24}{value:10,.2f}")


if __name__ == "__main__":
    main()

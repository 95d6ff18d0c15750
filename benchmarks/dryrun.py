"""What a dry run costs: `python benchmarks/dryrun.py [--json] [--quick]`.

One training step of Llama 3 at 8, 70 and 405 billion parameters, 8192 tokens, AdamW, with every layer run (`--full`)
and with layers of one kind run once, each in a process of its own; and PyTorch's own `MemTracker` on the same model on
fake tensors, which keeps peaks and no events. Seconds are those of the step, on a clock and of the processor (a busy
machine stretches the first only); memory is the process's largest resident set, imports included.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import torch

from evenload.ledger.curve import peaks
from evenload.model.presets import open_config
from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy
from evenload.record._torch_private import FakeTensorMode
from evenload.record.hugging_face import model_builder, token_batches
from evenload.record.planned import prepare_plan
from evenload.setup import Setup

SEQ = 8192
MODELS = {"llama-3-8b": 3.0, "llama-3-70b": 7.0, "llama-3.1-405b": 12.0}
"""Model -> seconds that a step with all layers may take."""
DEDUPLICATED = 2.0
"""Seconds that a step with few layers may take."""
PATIENCE = 300
"""Seconds after which MemTracker is stopped."""


def dry_run(name: str, *, full: bool) -> int:
    """Peak of a step."""
    config = open_config(name)
    layout = Layout.even(int(config["num_hidden_layers"]), pp=1)
    plan = Plan(setup=Setup(seq=SEQ), layout=layout, policy=Policy())
    go = prepare_plan(config, plan, steps=1, full=full)
    return timed(lambda: peaks(go()).held)


def mem_tracker(name: str) -> int:
    """The same with PyTorch's tracker."""
    from torch.distributed._tools.mem_tracker import MemTracker

    build = model_builder(open_config(name))

    def step() -> int:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = build()
            adamw = torch.optim.AdamW(model.parameters(), foreach=True)
            tracker = MemTracker()
            tracker.track_external(model, adamw)
            with tracker:
                model(**token_batches(model, micro_batch=1, seq=SEQ, device="cpu")()).loss.backward()
                adamw.step()
                adamw.zero_grad()
            return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])

    return timed(step)


def timed(step: Any) -> int:
    """Run a step and print what it took, for the process that started this one."""
    begin, processor = time.perf_counter(), time.process_time()
    peak = step()
    row = {"seconds": time.perf_counter() - begin, "processor": time.process_time() - processor, "peak": peak}
    row["MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(row))
    return peak


def measured(name: str, way: str) -> dict[str, float] | None:
    """What one way took in a process of its own; None: too long."""
    command = [sys.executable, __file__, "--one", name, way]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return None
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="MemTracker on the smallest model only")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        name, way = options.one
        if way == "MemTracker":
            mem_tracker(name)
        else:
            dry_run(name, full=way == "full")
        return
    answer: dict[str, dict[str, Any]] = {}
    for number, (name, allowed) in enumerate(MODELS.items()):
        for way, limit in (("deduplicated", DEDUPLICATED), ("full", allowed), ("MemTracker", None)):
            if way != "MemTracker" or number == 0 or (number == 1 and not options.quick):
                answer[f"{name}, {way}"] = {"row": measured(name, way), "allowed": limit}
    if options.json:
        print(json.dumps(answer, indent=2))
        return
    print(f"{'a step of':32}{'seconds':>9}{'processor':>11}{'allowed':>9}{'MiB':>7}{'peak GiB':>11}")
    for name, one in answer.items():
        row, allowed = one["row"], f"{one['allowed']:.0f}" if one["allowed"] else "-"
        if row is None:
            print(f"{name:32}{'over ' + str(PATIENCE):>9}")
            continue
        print(
            f"{name:32}{row['seconds']:9.1f}{row['processor']:11.1f}{allowed:>9}{row['MiB']:7.0f}"
            f"{row['peak'] / 2**30:11.2f}"
        )


if __name__ == "__main__":
    main()

"""Write the golden schedules of MindSpore: `python tests/plan/make_golden_mindspore.py PIPELINE_BUILDER [TARGET]`.

PIPELINE_BUILDER is the path of `perftool/autoparallel/pipeline_balance/simulator/pipeline_builder.py` in a checkout of
mindspore-ai/toolkits. Its blocks are replaced by stand-ins that only remember what they are, so nothing else is needed.
Sizes that its simulator refuses (fewer micro-batches than stages) or that deadlock there are left out.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

from golden_orders import FOLDER, compact, write

METHODS = {"1f1b": "1f1b", "vpp": "mindspore_interleaved", "vpp2": "interleaved_1f1b_less_memory"}


def block(rank: int, state: str, micro_batch: int, chunk: int, time: float, **_: object) -> SimpleNamespace:
    return SimpleNamespace(state=state, micro_batch=micro_batch, chunk=chunk, phase=None)


def builder(path: str) -> object:
    """The class in the file, with stand-ins for what it imports."""
    package = "toolkit.pipeline_balance.simulator.sim_block"
    parts = package.split(".")
    for length in range(1, len(parts) + 1):
        sys.modules[".".join(parts[:length])] = ModuleType(parts[length - 1])
    blocks = sys.modules[package]
    blocks.MicroBlockSim, blocks.BlockSim, blocks.HeadBlockSim = block, object, lambda rank: SimpleNamespace()
    return runpy.run_path(path)["PipelineBuilder"]


def cases(path: str) -> Iterator[dict[str, object]]:
    make = builder(path)
    for pp in range(2, 9):
        for method, name in METHODS.items():
            for chunks in (1,) if method == "1f1b" else (2, 3):
                for micro_batches in sorted({pp, pp + 1, 2 * pp - 1, 2 * pp, 2 * pp + 2, 3 * pp + 1}):
                    if method == "vpp2" and micro_batches % pp:
                        continue
                    lines = [
                        make.get_builder(method)(pp, micro_batches, chunks, rank, *([[0] * chunks] * 4))
                        for rank in range(pp)
                    ]
                    # the builder counts the chunks of backwards from the end of the pipeline
                    ranks = [
                        [
                            (b.state.upper(), b.chunk if b.state == "f" else chunks - 1 - b.chunk, b.micro_batch)
                            for b in line
                        ]
                        for line in lines
                    ]
                    size = {"schedule": name, "pp": pp, "interleave": chunks, "micro_batches": micro_batches}
                    yield size | compact(ranks)


if __name__ == "__main__":
    write(Path(sys.argv[2]) if len(sys.argv) > 2 else FOLDER / "mindspore.jsonl", cases(sys.argv[1]))

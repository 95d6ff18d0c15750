"""Records what the allocator really does while a stack of three real Llama layers runs forward and backward.

Writes `tests/data/layer_memory.json`; run it where torch and transformers are installed:

    python -m tests.profile.memory_recorder

Gradients of the parameters exist before, as from the second micro-batch on. Levels are bytes above those at the start.
oneDNN is off, whose CPU kernels for bf16 take scratch that other devices do not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LAYERS = 3
BASE = {"seq": 256, "hidden": 128, "intermediate": 352, "heads": 4, "kv_heads": 4, "batch": 1}
SIZES = (
    {},
    {"intermediate": 1500},
    {"kv_heads": 2, "batch": 2},
    {"heads": 16, "kv_heads": 16},
    {"seq": 64, "hidden": 256, "intermediate": 704},
)
FILE = Path(__file__).parents[1] / "data" / "layer_memory.json"


def measure(*, dtype: str, full: bool, sizes: dict[str, int]) -> dict[str, Any]:
    """Levels and peaks of one step: for every forward start, end and peak, then the peak of backward."""
    import torch
    from torch.utils.checkpoint import checkpoint
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    config = LlamaConfig(
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["intermediate"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
    )
    config._attn_implementation = "sdpa"
    layers = [LlamaDecoderLayer(config, i).to(kind) for i in range(LAYERS)]
    source = torch.randn(sizes["batch"], sizes["seq"], sizes["hidden"], dtype=kind, requires_grad=True)
    positions = LlamaRotaryEmbedding(config)(source, torch.arange(sizes["seq"])[None])
    for parameter in (source, *(p for layer in layers for p in layer.parameters())):
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        state = source * 1
        for layer in layers:
            with torch.profiler.record_function("forward"):
                if full:
                    state = checkpoint(layer, state, position_embeddings=positions, use_reentrant=False)
                else:
                    state = layer(state, position_embeddings=positions)
        loss = (state * state).sum()
        del state
        with torch.profiler.record_function("backward"):
            loss.backward()

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    moments: list[tuple[int, str, int]] = []
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            moments.append((event.start_ns(), "change", event.nbytes()))
        elif event.name() in {"forward", "backward"}:
            moments += [
                (event.start_ns(), "start", 0),
                (event.start_ns() + event.duration_ns(), f"end of {event.name()}", 0),
            ]
    return _levels(sorted(moments, key=lambda moment: moment[0]))


def _levels(moments: list[tuple[int, str, int]]) -> dict[str, Any]:
    level = peak = start = 0
    found: dict[str, Any] = {"forward": []}
    for _, what, change in moments:
        level += change
        peak = max(peak, level)
        if what == "start":
            start = peak = level
        elif what == "end of forward":
            found["forward"].append({"start": start, "end": level, "peak": peak})
        elif what == "end of backward":
            found["backward"] = {"start": start, "peak": peak}
    return found


def main() -> None:
    """Measure every case."""
    import torch

    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(_enabled=False)
    cases = []
    for dtype in ("fp32", "bf16"):
        for full in (False, True):
            for changes in SIZES:
                sizes = {**BASE, **changes}
                found = measure(dtype=dtype, full=full, sizes=sizes)
                cases.append({"dtype": dtype, "full": full, "sizes": sizes, "found": found})
    FILE.write_text(json.dumps(cases, indent=0) + "\n")


if __name__ == "__main__":
    main()

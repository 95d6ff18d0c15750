"""Records what the allocator really does while real decoder layers run forward and backward.

Writes `tests/data/layer_memory.json`; run it where torch and transformers are installed:

    python -m tests.profile.memory_recorder

Every case is a model without its last norm and head; the loss is the sum of squares of what the last layer returns.
Gradients of the parameters exist before, as from the second micro-batch on. Levels are bytes above those at the start.
oneDNN is off, whose CPU kernels for bf16 take scratch that other devices do not. Attention is what CUDA would run:
where that is no fused kernel (grouped keys in fp32), products and a softmax; the CPU's fused kernel allocates what the
others do, but for the layout of latent attention's result in fp32, which is left out.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "data" / "layer_memory.json"
BASE = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 61,
    "pad_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "intermediate_size": 160, "moe_intermediate_size": 160}
LATENT = {
    **EXPERTS,
    "first_k_dense_replace": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-wide": {"model_type": "llama", "intermediate_size": 1500},
    "llama-grouped": {"model_type": "llama", "num_key_value_heads": 2},
    "llama-heads": {"model_type": "llama", "num_attention_heads": 16, "num_key_value_heads": 16},
    "llama-weights": {"model_type": "llama", "hidden_size": 256, "intermediate_size": 1408},
    "qwen3": {"model_type": "qwen3", "head_dim": 40, "num_key_value_heads": 2},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 32, "layer_types": ["full_attention"] * 3},
    "mixtral": {"model_type": "mixtral", **EXPERTS, "num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": {"model_type": "qwen3_moe", **EXPERTS, "num_experts": 6, "head_dim": 32},
    "deepseek_v3": {"model_type": "deepseek_v3", **LATENT},
}
BATCH, SEQ = 2, 96


def measure(config: dict[str, Any], *, dtype: str, full: bool) -> dict[str, Any]:
    """Levels of one step: start and peak of every layer's forward, start and peak of the whole backward."""
    import torch
    import transformers
    from torch.nn.attention import SDPBackend, sdpa_kernel

    read = transformers.AutoConfig.for_model(**config)
    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    experts = {"experts_implementation": "grouped_mm"} if hasattr(read, "num_experts_per_tok") else {}
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(read, dtype=kind, attn_implementation="sdpa", **experts).train()
    model.norm = torch.nn.Identity()
    if full:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    marks: list[AbstractContextManager[Any]] = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: marks.append(torch.profiler.record_function("forward").__enter__()))
        layer.register_forward_hook(lambda *_: marks.pop().__exit__(None, None, None))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tokens = torch.randint(0, config["vocab_size"], (BATCH, SEQ))
    grouped = config["num_key_value_heads"] < config["num_attention_heads"]
    kernels = [SDPBackend.MATH] if dtype == "fp32" and grouped else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

    def step() -> None:
        state = model(input_ids=tokens, use_cache=False).last_hidden_state
        loss = (state * state).sum()
        del state
        with torch.profiler.record_function("backward"):
            loss.backward()

    with sdpa_kernel(kernels):
        step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
    moments: list[tuple[int, str, int]] = []
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            moments.append((event.start_ns(), "change", event.nbytes()))
        elif event.name() in {"forward", "backward"}:
            end = event.start_ns() + event.duration_ns()
            moments += [(event.start_ns(), f"start of {event.name()}", 0), (end, f"end of {event.name()}", 0)]
    return _levels(sorted(moments, key=lambda moment: moment[0]))


def _levels(moments: list[tuple[int, str, int]]) -> dict[str, Any]:
    level = peak = start = 0
    found: dict[str, Any] = {"forward": [], "backward": None}
    backward = None
    for _, what, change in moments:
        level += change
        peak = max(peak, level)
        if what == "start of backward":
            backward = peak = level
        elif what == "end of backward":
            found["backward"] = {"start": backward, "peak": peak}
        elif backward is None and what == "start of forward":
            start = peak = level
        elif backward is None and what == "end of forward":
            found["forward"].append({"start": start, "peak": peak})
    return found


def main() -> None:
    """Measure every case."""
    import torch

    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(_enabled=False)
    cases = []
    for name, changes in CONFIGS.items():
        config = {**BASE, **changes}
        for dtype in ("fp32", "bf16") if name != "deepseek_v3" else ("bf16",):
            for full in (False, True):
                found = measure(config, dtype=dtype, full=full)
                cases.append({"name": name, "config": config, "dtype": dtype, "full": full, "found": found})
    rows = ",\n".join(json.dumps(case) for case in cases)
    FILE.write_text(f'{{"batch": {BATCH}, "seq": {SEQ}, "cases": [\n{rows}\n]}}\n')


if __name__ == "__main__":
    main()

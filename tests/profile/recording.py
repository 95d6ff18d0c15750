"""Runs small real models and cuts their traces into layers: on the CPU, or on meta with the kernels of CUDA.

The columns of a row: path and names of the operator, bytes of the storages it made, what it keeps, what it reads. A
number is the n-th storage that the layer made; `input` is the layer's input; `table` is something made once for the
whole forward (positions, masks, labels, tokens). Parameters are left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import cases
import torch
import transformers
from cases import Case
from torch import distributed
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from tracer import Row, Trace, record

from evenload.record.substitutes import substituted, substituted_in_libraries
from evenload.record.targets import find_target

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Rows = list[list[Any]]


def trace_case(case: Case) -> dict[str, Rows]:
    """Rows of every layer of a case: `embedding`, `0`, `1` ..., `head`."""
    with ExitStack() as stack:
        if case.attention == "sdpa" and case.tp == 1:
            stack.enter_context(cuda_kernels())
        model = build(case)
        tables = {"tokens": torch.randint(0, model.config.vocab_size, (case.batch, case.seq))}
        if case.attention == "eager":
            tables["mask"] = torch.zeros(case.batch, 1, case.seq, case.seq, dtype=DTYPES[case.dtype])
        run = whole_model
        if case.tp > 1:
            stack.enter_context(fake_ranks(case.tp))
            parallelize(model, case)
            run = layer_by_layer
        trace = record(model, lambda: run(model, **tables), tables)
    return split_layers(trace)


def build(case: Case) -> Any:
    """The model of a case, ready to train."""
    config = transformers.AutoConfig.for_model(case.family, **{**cases.BASE, **case.config})
    # the loop over experts of "eager" depends on the data; this one has the same shapes however tokens are routed
    experts = {"experts_implementation": "grouped_mm"} if hasattr(config, "num_experts_per_tok") else {}
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        config, dtype=DTYPES[case.dtype], attn_implementation=case.attention, **experts
    ).train()


def whole_model(model: Any, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Loss of a forward pass as users call it."""
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def layer_by_layer(model: Any, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The same without the model's own forward, which cannot make masks for divided tensors."""
    positions = torch.arange(tokens.shape[1])[None]
    hidden = model.model.embed_tokens(tokens)
    tables = model.model.rotary_emb(hidden, positions)
    for layer in model.model.layers:
        hidden = layer(hidden, attention_mask=mask, position_embeddings=tables, position_ids=positions)
    with loss_parallel():
        logits = model.lm_head(model.model.norm(hidden))
        return model.loss_function(logits=logits, labels=tokens, vocab_size=model.config.vocab_size)


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """The meta device, with fused attention and masks as CUDA chooses them (`tests/profile/test_kernels.py`)."""
    target = find_target("cuda")
    importlib.import_module("transformers.masking_utils")
    with substituted(target, fake=False), substituted_in_libraries(target), torch.device("meta"):
        yield


@contextmanager
def fake_ranks(size: int) -> Iterator[None]:
    """A process group of which only this rank exists: collectives have the right shapes and no data."""
    distributed.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()


def parallelize(model: Any, case: Case) -> None:
    """Divide a model over tensor-parallel ranks as torchtitan divides Llama."""
    mesh = distributed.init_device_mesh("cpu", (case.tp,))
    tokens = Shard(1) if case.sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
        "lm_head": ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False),
    }
    columns = ["self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj", "self_attn.kv_b_proj"]
    columns.append("self_attn.q_b_proj" if hasattr(model.model.layers[0].self_attn, "q_b_proj") else "self_attn.q_proj")
    for index, layer in enumerate(model.model.layers):
        known = dict(layer.named_modules())
        styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns if name in known}
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            styles[name] = RowwiseParallel(output_layouts=tokens)
        if case.sequence_parallel:
            styles |= {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
            styles["self_attn"] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": tokens},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
                use_local_output="self_attn.kv_b_proj" in known,  # its down-projections are plain modules
            )
            styles["mlp"] = PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(Replicate(),))
        plan |= {f"model.layers.{index}.{name}": style for name, style in styles.items()}
    if case.sequence_parallel:
        plan["model.norm"] = SequenceParallel()
    parallelize_module(model, mesh, plan)


def split_layers(trace: Trace) -> dict[str, Rows]:
    """Rows of a whole model, cut into layers; what the model does once for all layers is left out."""
    layers: dict[str, list[tuple[str, Row]]] = {}
    current = "embedding"
    for row in trace.rows:
        parts = row.path.split(".")
        if parts[:2] == ["model", "layers"]:
            current, path = parts[2], ".".join(parts[3:])
        elif current != "embedding" and row.path in {"model.norm", "lm_head", ""}:
            current, path = "head", row.path.removeprefix("model.")
        elif row.path.startswith("model.embed_tokens"):
            path = row.path.removeprefix("model.")
        else:
            continue
        layers.setdefault(current, []).append((path, row))
    return {name: _numbered(rows, trace) for name, rows in layers.items()}


def _numbered(rows: list[tuple[str, Row]], trace: Trace) -> Rows:
    own: dict[int, int] = {}
    for _, row in rows:
        for number in row.made:
            own[number] = len(own)
    entering = next((number for _, row in rows for number in row.reads if number not in trace.known), None)

    def name(number: int) -> int | str | None:
        if number in own:
            return own[number]
        if trace.known.get(number, "tokens") not in {"tokens", "mask"}:
            return None  # a parameter
        return "input" if number == entering else "table"

    def names(numbers: list[int]) -> list[int | str]:
        return sorted({found for number in numbers if (found := name(number)) is not None}, key=str)

    return [
        [
            ".".join(part for part in (path, row.name, row.aten if row.aten != row.name else "") if part),
            [trace.nbytes[number] for number in row.made],
            names(row.keeps),
            names(row.reads),
        ]
        for path, row in rows
    ]

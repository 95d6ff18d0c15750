"""Operator by operator, a traced block keeps what the formula of the same block says."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evenload.plan.operators import Graph
from evenload.profile.blocks import block_graph
from evenload.profile.traced import LAST
from evenload.recompute.trace_model import trace_model
from evenload.record.dryrun import preparing
from evenload.record.hugging_face import model_builder, token_batches

sys.path.insert(0, str(Path(__file__).parent.parent / "profile"))
import cases
import models

torch.set_num_threads(1)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SMALL = 16
"""Bytes of a seed of random numbers, which formulas leave out."""


def comparable(case):
    """Whether a formula for CUDA is meant to say the same.

    Formulas count fused attention as in 16-bit types, and heads without the padding to a multiple of 8; grouped
    products of experts run in bf16 only.
    """
    config = case.full_config()
    if "kv_lora_rank" in config:
        widths = [config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]]
    else:
        widths = [config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]]
    experts = any(name in config for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    fused = case.attention == "sdpa"
    return not (case.dtype == "fp32" and (fused or experts)) and not (fused and any(width % 8 for width in widths))


def of_family(family):
    """The cases of the golden traces, and two more of widths that CUDA's kernels take."""
    found = cases.FAMILIES[family]()
    if family == "deepseek_v3":
        found.append(replace(found[0], name="narrow_aligned", config={**found[0].config, "v_head_dim": 16}))
    if family == "qwen3":
        found.append(replace(found[0], name="aligned", config={**found[0].config, "head_dim": 24}))
    return found


CASES = [
    pytest.param(case, id=f"{family}-{case.name}")
    for family in ("llama", "qwen3", "mixtral", "deepseek_v3")
    for case in of_family(family)
    if comparable(case)
]


def kept(graph: Graph) -> list[tuple[str, list[int]]]:
    """(operator, bytes of its results that are kept), in order.

    An operator in place keeps a copy of what it writes over, made just before; formulas count the original.
    """
    names = set(graph.kept())
    rows: dict[str, list[int]] = {}
    for operator in graph.operators:
        label = operator.label
        if operator.aten == "clone" and operator.name.endswith("_"):
            maker = graph.operators[graph.producers[operator.inputs[0]]]
            label = maker.label
        for name in operator.outputs:
            if name in names and graph.nbytes(name) > SMALL:
                rows.setdefault(label, []).append(graph.nbytes(name))
    return sorted((label, sorted(sizes)) for label, sizes in rows.items())


@pytest.mark.parametrize("case", CASES)
def test_a_traced_block_keeps_what_the_formula_says_operator_by_operator(case):
    build = model_builder(case.full_config(), dtype=DTYPES[case.dtype], attention=case.attention)
    inputs = lambda m: token_batches(m, micro_batch=case.batch, seq=case.seq, device="cpu")()  # noqa: E731
    traced = trace_model(preparing(build, device="cuda", inputs=inputs))
    model, setup = models.model_of(case.as_json()), models.setup_of(case.as_json())
    for kind, layer in dict(zip(traced.kinds, model.blocks, strict=True)).items():
        formula = block_graph(model, layer, setup)
        assert kept(traced.graphs[kind]) == kept(formula)
        assert (traced.graphs[kind].input in traced.graphs[kind].kept()) == (formula.input in formula.kept())


@pytest.mark.parametrize("name", ["grouped-bf16-sdpa", "single-bf16-sdpa", "biased", "aligned"])
def test_under_autocast_too(name):
    case = next(one for family in ("llama", "qwen3") for one in of_family(family) if one.name == name)
    build = model_builder(case.full_config(), dtype=torch.float32)
    inputs = lambda m: token_batches(m, micro_batch=case.batch, seq=case.seq, device="cpu")()  # noqa: E731
    traced = trace_model(preparing(build, device="cuda", inputs=inputs, autocast=torch.bfloat16))
    model = models.model_of(case.as_json())
    setup = models.setup_of({**case.as_json(), "dtype": "fp32", "attention": "sdpa"})
    for kind, layer in ((traced.kinds[0], model.blocks[0]), (LAST, model.head)):
        formula = block_graph(model, layer, setup, autocast="bf16")
        mine = [(label.removeprefix("model."), sizes) for label, sizes in kept(traced.graphs[kind])]
        assert mine == kept(formula)
        assert traced.memory[kind][0].net == pytest.approx(formula.kept_bytes, abs=32)


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3"])
def test_autocast_changes_nothing_where_parameters_have_its_type(family):
    case = next(one for one in of_family(family) if one.dtype == "bf16" and one.attention == "sdpa")
    build = model_builder(case.full_config(), dtype=torch.bfloat16)
    inputs = lambda m: token_batches(m, micro_batch=case.batch, seq=case.seq, device="cpu")()  # noqa: E731
    traced = trace_model(preparing(build, device="cuda", inputs=inputs, autocast=torch.bfloat16))
    model, setup = models.model_of(case.as_json()), models.setup_of(case.as_json())
    for kind, layer in dict(zip(traced.kinds, model.blocks, strict=True)).items():
        assert kept(traced.graphs[kind]) == kept(block_graph(model, layer, setup, autocast="bf16"))

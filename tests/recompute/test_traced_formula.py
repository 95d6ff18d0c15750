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
_slow = pytest.mark.slow
SMALL = 16
"""Bytes of a seed of random numbers, which formulas leave out."""


def comparable(case):
    """Grouped products of experts run in 16-bit types only."""
    experts = any(name in case.full_config() for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return case.dtype != "fp32" or not experts


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


WIDTHS = (64, 80, 96, 100, 128, 192, 256, 512)
QUICK = {("fp32", None, 64), ("fp32", "bf16", 100), ("bf16", None, 512), ("fp16", None, 100)}


@pytest.mark.parametrize("kv_heads", [4, 2], ids=["as many keys", "grouped keys"])
@pytest.mark.parametrize(
    ("dtype", "autocast", "width"),
    [
        pytest.param(*one, width, id=f"{one[0]}-{one[1]}-{width}", marks=() if (*one, width) in QUICK else _slow)
        for one, widths in (
            (("fp32", None), WIDTHS),
            (("fp32", "bf16"), WIDTHS[::3]),
            (("bf16", None), WIDTHS),
            (("fp16", None), WIDTHS[::3]),
        )
        for width in widths
    ],
)
def test_the_kernel_of_the_formula_is_the_one_that_runs(dtype, autocast, width, kv_heads):
    """Gemma 3 has a layer with a mask (a window) and one without."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": kv_heads, "head_dim": width, "hidden_size": 32}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "num_hidden_layers": 2}
    case = cases.Case(name="widths", family="gemma3_text", config={**heads, **layers}, seq=20, dtype=dtype)
    build = model_builder(case.full_config(), dtype=DTYPES[dtype])
    inputs = lambda m: token_batches(m, micro_batch=case.batch, seq=case.seq, device="cpu")()  # noqa: E731
    traced = trace_model(preparing(build, device="cuda", inputs=inputs, autocast=DTYPES.get(autocast)))
    model, setup = models.model_of(case.as_json()), models.setup_of(case.as_json())
    for kind, layer in dict(zip(traced.kinds, model.blocks, strict=True)).items():
        assert kept(traced.graphs[kind]) == kept(block_graph(model, layer, setup, autocast=autocast))


UNDER_AUTOCAST = [
    ("llama", ("grouped-bf16-sdpa", "single-bf16-sdpa", "biased", "grouped-bf16-eager")),
    ("qwen3", ("aligned",)),
    ("mistral", ("short_window-bf16-sdpa", "short_window-bf16-eager", "short_window_multi_query")),
    ("gemma2", ("capped-bf16-eager",)),
    ("phi3", ("partial-bf16-sdpa", "partial-bf16-eager")),
    ("mixtral", ("experts-bf16-sdpa",)),
    ("qwen3_moe", ("experts-bf16-eager",)),
    ("deepseek_v2", ("grouped-bf16-sdpa", "narrow-eager")),
    ("deepseek_v3", ("pairs-bf16-sdpa", "pairs-bf16-eager", "halves")),
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{family}-{case.name}")
        for family, names in UNDER_AUTOCAST
        for case in of_family(family)
        if case.name in names
    ],
)
def test_under_autocast_too(case):
    build = model_builder(case.full_config(), dtype=torch.float32, attention=case.attention)
    inputs = lambda m: token_batches(m, micro_batch=case.batch, seq=case.seq, device="cpu")()  # noqa: E731
    traced = trace_model(preparing(build, device="cuda", inputs=inputs, autocast=torch.bfloat16))
    model = models.model_of(case.as_json())
    setup = models.setup_of({**case.as_json(), "dtype": "fp32"})
    blocks = dict(zip(traced.kinds, model.blocks, strict=True))
    for kind, layer in (*blocks.items(), (LAST, model.head)):
        formula = block_graph(model, layer, setup, autocast="bf16")
        mine = [(label.removeprefix("model."), sizes) for label, sizes in kept(traced.graphs[kind])]
        assert mine == kept(formula)
        assert traced.memory[kind].forward.net == pytest.approx(formula.kept_bytes, abs=32)


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3"])
def test_autocast_changes_nothing_where_parameters_have_its_type(family):
    case = next(one for one in of_family(family) if one.dtype == "bf16" and one.attention == "sdpa")
    build = model_builder(case.full_config(), dtype=torch.bfloat16)
    inputs = lambda m: token_batches(m, micro_batch=case.batch, seq=case.seq, device="cpu")()  # noqa: E731
    traced = trace_model(preparing(build, device="cuda", inputs=inputs, autocast=torch.bfloat16))
    model, setup = models.model_of(case.as_json()), models.setup_of(case.as_json())
    for kind, layer in dict(zip(traced.kinds, model.blocks, strict=True)).items():
        assert kept(traced.graphs[kind]) == kept(block_graph(model, layer, setup, autocast="bf16"))

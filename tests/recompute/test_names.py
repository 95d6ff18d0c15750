"""Patterns hit what they mean on recorded layers of Hugging Face and of torchtitan's kind."""

from __future__ import annotations

import pytest
import torch
from tests.recompute.models import FAMILIES, Norm
from torch import nn
from torch.nn import functional

from evenload.plan.patterns import match
from evenload.plan.policy import DEFAULT_COMM, DEFAULT_SELECT
from evenload.recompute import apply

torch.set_num_threads(1)


class TitanAttention(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x):
        query, key, value = (one(x).view(*x.shape[:2], 4, -1).transpose(1, 2) for one in (self.wq, self.wk, self.wv))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(x.shape))


class TitanFeedForward(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(hidden, width, bias=False), nn.Linear(hidden, width, bias=False)
        self.w2 = nn.Linear(width, hidden, bias=False)

    def forward(self, x):
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class TitanBlock(nn.Module):
    """A Llama block as torchtitan names its parts."""

    def __init__(self, hidden: int = 32, width: int = 88) -> None:
        super().__init__()
        self.attention, self.feed_forward = TitanAttention(hidden), TitanFeedForward(hidden, width)
        self.attention_norm, self.ffn_norm = Norm(hidden), Norm(hidden)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


def recorded(name: str):
    """Graph of one layer in bf16."""
    if name == "torchtitan":
        layers = nn.ModuleList(TitanBlock().bfloat16() for _ in range(2))

        def forward():
            x = torch.randn(2, 32, 32, dtype=torch.bfloat16, requires_grad=True) * 1
            for layer in layers:
                x = layer(x)
    else:
        layers, forward = FAMILIES[name](dtype=torch.bfloat16)
    with apply(layers, select=["nothing"]) as handle:
        forward()
        return list(handle.graphs().values())[-1]


EXPECTED = {
    r"feed_forward\.mul": {"mlp.mul", "feed_forward.mul"},
    r"feed_forward\.w1\.activation\.silu": {"mlp.act_fn.silu", "feed_forward.silu"},
    r"feed_forward\.w1\.matmul": {"mlp.gate_proj.linear.mm", "feed_forward.w1.linear.mm"},
    r"feed_forward\.w3\.matmul": {"mlp.up_proj.linear.mm", "feed_forward.w3.linear.mm"},
    r"feed_forward\.w2\.matmul": {"mlp.down_proj.linear.mm", "feed_forward.w2.linear.mm"},
    r"attention\.wo\.matmul": {"self_attn.o_proj.linear.mm", "attention.wo.linear.mm"},
}
"""The seed's patterns -> what they hit on Hugging Face's or torchtitan's blocks."""


@pytest.mark.parametrize("name", ["llama", "qwen3", "torchtitan"])
def test_the_seeds_patterns_hit_what_they_mean(name):
    graph = recorded(name)
    for pattern, labels in EXPECTED.items():
        found = {operator.label for operator in match(pattern, graph).operators}
        assert found
        assert found <= labels
    for pattern in (r"ffn_norm\.norm", r"attention_norm\.norm", *DEFAULT_COMM):
        hit = match(pattern, graph)
        assert len(hit.operators) >= 7
        assert all("norm" in operator.path for operator in hit.operators)
    (fused,) = match(r"attention\.flash_attention", graph).operators
    assert fused.name == "scaled_dot_product_attention"
    assert len([one for text in DEFAULT_SELECT for one in match(text, graph).operators]) == 2


@pytest.mark.parametrize(
    "pattern", [r"mlp\.experts\.mul", r"mlp\.gate\..*", r"mlp\.shared_experts\..*", r"feed_forward"]
)
def test_experts_are_found_by_name(pattern):
    assert match(pattern, recorded("deepseek v3"))


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("1 - x", "sub"),
        ("2 / x", "div"),
        ("2**x", "pow"),
        ("-x", "neg"),
        ("x.float()", "cast"),
        ("x.to(torch.float64)", "cast"),
        ("x @ x.transpose(0, 1)", "matmul"),
        ("torch.softmax(x, -1)", "softmax"),
        ("torch.nn.functional.silu(x)", "silu"),
        ("torch.nn.functional.rms_norm(x, (8,))", "rms_norm"),
        ("torch.nn.functional.layer_norm(x, (8,))", "layer_norm"),
        ("x.mul(x)", "mul"),
        ("x.clone().mul_(2)", "mul"),
        ("torch.cat((x, x))", "cat"),
        ("torch.nn.functional.dropout(x, 0.5)", "dropout"),
        ("x.clone().add_(x)", "add"),
        ("x.masked_fill(x > 0, 0.0)", "masked_fill"),
    ],
)
def test_operators_are_called_what_a_user_sees_in_the_code(code, name):
    class One(nn.Module):
        def forward(self, x):
            return eval(code, {"torch": torch, "x": x})

    layer = One()
    with apply(layer, select=["nothing"]) as handle:
        layer(torch.rand(8, 8, dtype=torch.bfloat16, requires_grad=True) + 0.5)
        (graph,) = handle.graphs().values()
    assert match(name, graph), [operator.label for operator in graph.operators]


def test_what_autocast_converts_is_no_matrix_product():
    """So weights' copies can be dropped while products stay kept."""
    model, forward = FAMILIES["llama"]()
    products = (r".*\..*\.matmul", r"self_attn\.flash_attention")
    with apply(model, select=[".*"], exclude=products) as handle:
        with torch.autocast("cpu", torch.bfloat16):
            forward()
        graph = next(iter(handle.graphs().values()))
        kept = handle._states[0].last.decision.kept
    casts = match(r"mlp\.(gate|up|down)_proj\.cast", graph).operators
    assert len(casts) == 5  # of three weights and two inputs; what goes into down_proj is narrow already
    assert not {name for operator in casts for name in operator.outputs}.intersection(kept)
    assert {operator.aten or operator.name for operator in match(products[0], graph).operators} == {"mm"}

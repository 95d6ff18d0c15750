"""Random layers: whatever a layer does, gradients are the same to the bit and bytes are as predicted."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.recompute.blocks import Gate
from tests.recompute.measuring import allocated, gradients, same
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from evenload.plan.policy import LayerPolicy
from evenload.recompute import apply

torch.set_num_threads(1)

WIDTH = 16
Values = list[torch.Tensor]
Make = Callable[[nn.Module, Values, int], torch.Tensor]


def _other(values: Values, at: int) -> torch.Tensor:
    return values[at % len(values)]


def _gather(layer: nn.Module, values: Values, at: int) -> torch.Tensor:
    rows = torch.arange(values[-1].shape[0], device=values[-1].device).flip(0)
    return values[-1][rows]


def _rotated(layer: nn.Module, values: Values, at: int) -> torch.Tensor:
    pairs = torch.view_as_complex(values[-1].float().reshape(*values[-1].shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.exp(1j * layer.angle)).flatten(-2).to(values[-1].dtype)


def _written(layer: nn.Module, values: Values, at: int) -> torch.Tensor:
    y = values[-1] * 0.5
    y[..., : WIDTH // 2].mul_(2)
    y.add_(_other(values, at).detach())
    return y


def _scattered(layer: nn.Module, values: Values, at: int) -> torch.Tensor:
    y = torch.zeros_like(values[-1])
    return y.index_add_(0, torch.arange(y.shape[0]).flip(0), values[-1])


def _normed(layer: nn.Module, values: Values, at: int) -> torch.Tensor:
    wide = values[-1].double()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-3)).to(values[-1].dtype) * layer.weight


STEPS: dict[str, Make] = {
    "silu": lambda layer, values, at: functional.silu(values[-1]),
    "exp": lambda layer, values, at: (values[-1] * 0.1).exp(),
    "softmax": lambda layer, values, at: values[-1].softmax(-1) * WIDTH,
    "add": lambda layer, values, at: values[-1] + _other(values, at),
    "mul": lambda layer, values, at: values[-1] * _other(values, at),
    "square": lambda layer, values, at: values[-1] ** 2,
    "linear": lambda layer, values, at: layer.linears[at % 2](values[-1]),
    "module": lambda layer, values, at: layer.act(values[-1]),
    "norm": lambda layer, values, at: layer.norm(values[-1]),
    "written norm": _normed,
    "dropout": lambda layer, values, at: layer.drop(values[-1]),
    "cast": lambda layer, values, at: values[-1].double().tanh().to(values[-1].dtype),
    "turn": lambda layer, values, at: values[-1].transpose(0, 1).contiguous().transpose(0, 1),
    "halves": lambda layer, values, at: torch.cat(values[-1].chunk(2, -1)[::-1], -1),
    "split": lambda layer, values, at: values[-1][..., :8].repeat(1, 1, 2) * values[-1],
    "in place": lambda layer, values, at: (values[-1] + 1).mul_(0.5).sigmoid_(),
    "written": _written,
    "scattered": _scattered,
    "gather": _gather,
    "complex": _rotated,
    "custom": lambda layer, values, at: Gate.apply(values[-1], _other(values, at)),
    "checkpoint": lambda layer, values, at: checkpoint(layer.linears[at % 2], values[-1], use_reentrant=False).tanh(),
    "detached": lambda layer, values, at: values[-1] * _other(values, at).detach().sin(),
    "no grad": lambda layer, values, at: _without_gradient(values[-1]) * values[-1],
    "where": lambda layer, values, at: torch.where(values[-1] > 0, values[-1], _other(values, at) * 0.5),
    "mask": lambda layer, values, at: values[-1].masked_fill(values[-1] > 1, 0.25),
    "attention": lambda layer, values, at: _attended(values[-1], _other(values, at)),
    "buffer": lambda layer, values, at: values[-1] * layer.scale,
    "largest": lambda layer, values, at: values[-1] - values[-1].amax(-1, keepdim=True),
    "sorted": lambda layer, values, at: values[-1].sort(-1).values,
    "twice": lambda layer, values, at: layer.act(layer.act(values[-1]) + 1),
}


def _without_gradient(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x.abs().log1p()


def _attended(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    query, key = x.view(*x.shape[:2], 2, 8).transpose(1, 2), y.view(*y.shape[:2], 2, 8).transpose(1, 2)
    return functional.scaled_dot_product_attention(query, key, key, is_causal=True).transpose(1, 2).reshape(x.shape)


class Random(nn.Module):
    def __init__(self, steps: list[tuple[str, int]]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.act, self.drop, self.norm = nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(WIDTH)
        self.weight, self.angle = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.rand(WIDTH // 2))
        self.register_buffer("scale", torch.rand(WIDTH))
        self.steps = steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x]
        for name, at in self.steps:
            y = STEPS[name](self, values, at)
            values.append(y / (1 + y.detach().abs().mean()))
        return values[-1] + values[len(values) // 2]


class Model(nn.Module):
    def __init__(self, layers: list[list[tuple[str, int]]]) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(4, WIDTH), nn.ModuleList(map(Random, layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


STEP = st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 5))
PATTERNS = st.one_of(
    st.lists(
        st.sampled_from(
            [".*", "act", "norm", "drop", "linears", *(f".*{word}.*" for word in ("mul", "add", "tanh", "exp"))]
        ),
        min_size=1,
        max_size=3,
    ).map(lambda patterns: LayerPolicy(select=tuple(patterns))),
    st.just(LayerPolicy(full=True)),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(STEP, min_size=1, max_size=8), min_size=1, max_size=2),
    PATTERNS,
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_any_layer_under_any_policy(layers, policy, dtype, rehearse):
    torch.manual_seed(0)
    model = Model(layers).to(dtype)
    x = torch.randn(2, 6, 4, dtype=dtype)

    def forward():
        torch.manual_seed(3)
        return model(x)

    def step():
        model.zero_grad()
        forward().backward()
        return gradients(model)

    step()
    expected = step()
    plain = allocated(forward)[0]
    with apply(model, policy, layers="layers", whole="engine", rehearse=rehearse) as handle:
        for _ in range(3):
            assert same(step(), expected)
        kept = allocated(forward)[0]
        report = handle.report()
        assert plain - kept == report.freed, report
        if not policy.full:
            assert report.freed >= 0
        assert not any(state.why_kept for state in handle._states)
        gc.collect()
        gc.disable()
        try:
            model.zero_grad()
            assert allocated(lambda: (step(), model.zero_grad())[1])[0] == 0
        finally:
            gc.enable()

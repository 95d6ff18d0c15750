"""Toy layers, each with one thing that makes recomputation difficult."""

from __future__ import annotations

from typing import Any

import torch
from tests.recompute.models import Mlp, Norm
from torch import nn
from torch.nn import functional

HIDDEN, WIDE = 32, 64


class Ends(nn.Module):
    """Two linear layers, between which subclasses do something."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(HIDDEN, WIDE)
        self.b = nn.Linear(WIDE, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(self.middle(self.a(x)))

    def middle(self, y: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Views(Ends):
    def middle(self, y):
        left, right = y.chunk(2, -1)
        mixed = torch.sigmoid(left) * right.transpose(-1, -2).transpose(-1, -2)
        mixed = mixed.reshape(*mixed.shape[:2], 4, 8).transpose(1, 2).contiguous().transpose(1, 2).flatten(2)
        return torch.cat((mixed.tanh() * mixed, mixed[..., :32].exp()), -1)


class InPlace(Ends):
    def middle(self, y):
        z = y.tanh() * 2
        z.add_(1)
        z.mul_(0.5)
        z = z.relu_()
        w = z * z.detach() + z
        w[..., :4].mul_(2.0)
        return w * w


class Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.drop = Norm(HIDDEN), Mlp(HIDDEN, 88), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(self.mlp(self.norm(x)))


class Gate(torch.autograd.Function):
    """y * x * sigmoid(x), with a backward of its own that needs a result of forward's middle."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        open_ = torch.sigmoid(x)
        ctx.save_for_backward(x, y, open_)
        return open_ * y * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y, open_ = ctx.saved_tensors
        return grad * y * (open_ + x * open_ * (1 - open_)), grad * open_ * x


class CustomFunction(Ends):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(WIDE, WIDE)

    def middle(self, y):
        return Gate.apply(y, self.c(y))


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN), dropout

    def forward(self, x):
        query, key, value = self.qkv(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


class LayerNorm(Ends):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second = nn.LayerNorm(WIDE), nn.RMSNorm(WIDE)

    def middle(self, y):
        return functional.gelu(self.second(self.norm(y)))


class BatchNorm(Ends):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def middle(self, y):
        return functional.gelu(self.norm(y))


class Branch(Ends):
    """Goes one way or another, by its data; both ways save tensors of the same shapes."""

    def middle(self, y):
        y = functional.silu(y)
        y = y * 2.0 if y.sum() > 0 else y * 3.0
        return y * y


class Functional(nn.Module):
    """No modules inside: what recomputation must start from passes only inside the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(HIDDEN))
        self.a = nn.Parameter(torch.randn(HIDDEN, WIDE) / 8)
        self.b = nn.Parameter(torch.randn(WIDE, HIDDEN) / 8)

    def forward(self, x):
        h = torch.cat((x[..., 16:], x[..., :16]), -1) + x.mean(-1, keepdim=True)
        wide = h.float()
        n = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.w
        return h + functional.silu(n @ self.a) @ self.b

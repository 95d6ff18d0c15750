"""Training that changes from step to step, with recomputation and without."""

from __future__ import annotations

import random

import torch
from tests.recompute.measuring import gradients, same

from evenload.recompute import apply

EVERYTHING = (".*", r".*\..*")


def backward(model, forward, seed: int = 3):
    model.zero_grad()
    torch.manual_seed(seed)
    random.seed(seed)
    forward().backward()
    return gradients(model)


def follows(model, forward, changes, patterns=EVERYTHING):
    """Train with each change in turn, with and without recomputation, and compare. Returns how layers were served."""
    expected = []
    for change in changes:
        change()
        expected.append(backward(model, forward))
    with apply(model, select=patterns) as handle:
        for change, one in zip(changes, expected, strict=True):
            change()
            assert same(backward(model, forward), one)
        return handle._states[0].served

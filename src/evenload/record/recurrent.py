"""Recurrent layers as an accelerator runs them: all layers in one operator, not one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch

from evenload.record._torch_private import fused_rnn

_LSTM: Final = 2
NETWORKS: Final[Mapping[str, int]] = MappingProxyType({"rnn_relu": 0, "rnn_tanh": 1, "lstm": _LSTM, "gru": 3})
"""Operator -> its number in cuDNN.

Source: `cudnnRNNMode_t`, as in `RNNDescriptorParams::set_mode` of aten/src/ATen/native/cudnn/RNN.cpp.
"""


def recurrent(name: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The operator `name.input` with the kernel that runs on the target."""
    mode = NETWORKS[name]

    def run(  # noqa: PLR0917  # the signature of the operators
        inputs: torch.Tensor,
        states: Any,
        weights: Sequence[torch.Tensor],
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[torch.Tensor, ...]:
        hidden, cell = (states[0], states[1]) if mode == _LSTM else (states, None)
        width = hidden.shape[-1] if cell is None else cell.shape[-1]
        projected = hidden.shape[-1] if width != hidden.shape[-1] else 0
        each = (4 if has_biases else 2) + bool(projected)
        output, last, last_cell, _, _ = fused_rnn(
            inputs,
            weights,
            each,
            None,
            hidden.contiguous(),
            None if cell is None else cell.contiguous(),
            mode,
            width,
            projected,
            layers,
            batch_first,
            dropout,
            train,
            bidirectional,
            [],
            None,
        )
        return (output, last) if cell is None else (output, last, last_cell)

    return run

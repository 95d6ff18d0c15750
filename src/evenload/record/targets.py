"""The table of operator choices: what runs on the device that a dry run stands for, where this host would differ.

A dry run computes shapes on fake CPU tensors or on `meta`. Where PyTorch chooses an operator by the device, the choice
of the target is put in its place; every choice that does so is a row here, and rows are what `--verbose` prints.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from evenload.errors import EvenloadError, did_you_mean, shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One operator whose memory depends on the device, and what a dry run takes."""

    operator: str
    """What the model calls."""
    runs: str
    """What is taken for the target."""
    here: str
    """What would run on this host."""
    effect: str
    """What differs in memory."""
    source: str
    """Where the rule is from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workspace:
    """Device memory that no dry run sees, because kernels ask for it themselves."""

    name: str
    nbytes: int | None
    """Bytes of one of them; None: depends on the run."""
    inside: bool
    """Inside PyTorch's allocator, so that `torch.cuda.max_memory_allocated` counts it."""
    note: str
    source: str
    operators: tuple[str, ...] = ()
    """What the names of the operators begin with whose kernels ask for it; empty: it does not take one."""

    def asked_by(self, ran: Collection[str]) -> tuple[str, ...]:
        """Operators that ask for it, out of those that ran."""
        return tuple(sorted(name for name in ran if name.startswith(self.operators)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The device that a dry run stands for."""

    kind: str
    """`cuda`, `npu`, `xpu` or `cpu`."""
    name: str
    """What the ledger calls it, `cuda:0`."""

    @property
    def accelerator(self) -> bool:
        """Whether it has a memory of its own."""
        return self.kind != "cpu"

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Rows of the table that hold for it."""
        return (*(ACCELERATOR_CHOICES if self.accelerator else ()), *COMMON_CHOICES)

    @property
    def workspaces(self) -> tuple[Workspace, ...]:
        """Rows of the table of what is not seen."""
        return {"cuda": CUDA_WORKSPACES, "cpu": CPU_WORKSPACES}.get(self.kind, ())

    def unseen(self, ran: Collection[str]) -> tuple[tuple[Workspace, tuple[str, ...]], ...]:
        """Rows of that table that hold where some operators ran, and which of them each is about."""
        asked = [(row, row.asked_by(ran)) for row in self.workspaces]
        return tuple((row, names) for row, names in asked if names or not row.operators)


KINDS: Final = ("cuda", "npu", "xpu", "cpu")
"""Devices that a dry run can stand for."""


def find_target(device: object) -> Target:
    """The target of a device's name, such as `cuda`, `cuda:3` or `cpu`.

    Raises:
        EvenloadError: no such device.
    """
    text = str(device).strip().lower()
    kind, _, index = text.partition(":")
    if kind not in KINDS or (index and not (index.isdecimal() and len(index) < 4)) or text.endswith(":"):
        raise EvenloadError(
            f"device is {shown(device)}",
            where="$.device",
            fix=did_you_mean(kind, list(KINDS)) or f"use one of {', '.join(KINDS)}",
        )
    return Target(kind=kind, name="cpu" if kind == "cpu" else f"{kind}:{int(index or 0)}")


ACCELERATOR_CHOICES: Final = (
    Choice(
        operator="scaled_dot_product_attention",
        runs="flash attention (16-bit types, no mask, equal head widths up to 256); memory-efficient attention "
        "(masks, 32-bit types, other widths); otherwise matmul, softmax, matmul",
        here="flash attention for CPU on fake tensors, matmul, softmax, matmul on meta tensors",
        effect="the fused kernels keep their result and one fp32 number per row instead of all scores",
        source="aten/src/ATen/native/transformers: cuda/sdp_utils.cpp (order and conditions), attention.cpp (padding)",
    ),
    Choice(
        operator="flex_attention",
        runs="flash attention with the same queries, keys and values",
        here="refused: there is no fake backward of it on the CPU",
        effect="keeps its result and one fp32 number per row; block masks are not followed",
        source="torch/nn/attention/flex_attention.py",
    ),
    Choice(
        operator="LSTM, GRU and RNN",
        runs="one operator for all layers, cuDNN's on CUDA, which keeps what backward needs in a reserve of its own",
        here="an operator for every layer and direction (LSTM), or one for every step (GRU, RNN)",
        effect="no results of single gates, steps and layers; the reserve is a row of what is not seen",
        source="aten/src/ATen/native/RNN.cpp: use_cudnn; aten/src/ATen/native/cudnn/RNN.cpp",
    ),
    Choice(
        operator="optimizers and gradient clipping with foreach=None",
        runs="foreach, one kernel over all parameters",
        here="a loop over parameters",
        effect="foreach makes temporaries for all parameters at a time: AdamW one more copy of the parameters",
        source="torch/optim/optimizer.py: _default_to_fused_or_foreach; torch/utils/_foreach_utils.py",
    ),
    Choice(
        operator="torch.tensor(number), such as the step counters of AdamW",
        runs="in the memory of the host",
        here="beside all other tensors",
        effect="4 bytes for every parameter are not on the device",
        source="torch/optim/adamw.py, torch/optim/adam.py: _init_group",
    ),
    Choice(
        operator='torch.autocast("cuda")',
        runs="the target's lists of operators in 16-bit and in fp32 types",
        here="the shorter lists of the CPU, or no autocast at all",
        effect="softmax, norms, sums and losses compute and keep fp32 under autocast",
        source="aten/src/ATen/autocast_mode.h",
    ),
)
COMMON_CHOICES: Final = (
    Choice(
        operator="masks in transformers",
        runs="no mask where a batch is neither packed nor padded, decided by looking at positions and attention_mask",
        here="a mask, because data cannot be looked at",
        effect="a mask of tokens x tokens for every layer, and no flash attention",
        source="transformers/masking_utils.py: find_packed_sequence_indices, _ignore_causal_mask_sdpa, "
        "_ignore_bidirectional_mask_sdpa",
    ),
    Choice(
        operator="mixture-of-experts layers in transformers",
        runs="grouped_mm, one product over tokens sorted by expert",
        here="the same; the loop over experts (eager) needs the data",
        effect="every token is counted once for each of its experts, whatever the router decides",
        source="transformers/integrations/moe.py",
    ),
    Choice(
        operator="waiting for a collective",
        runs="returns the tensor that the collective made",
        here="a copy of it",
        effect="every result of a functional collective would count twice",
        source="torch/distributed/_functional_collectives.py",
    ),
)

CUDA_WORKSPACES: Final = (
    Workspace(
        name="cuBLAS workspace",
        nbytes=32 * 2**20,
        inside=True,
        note="for every handle and stream on Hopper; 8,519,680 bytes on other devices; CUBLAS_WORKSPACE_CONFIG sets it",
        source="aten/src/ATen/cuda/CublasHandlePool.cpp",
    ),
    Workspace(
        name="accumulator of flash attention's backward",
        nbytes=None,
        inside=True,
        note="fp32 gradients of the queries and one fp32 number per row of one layer, while its backward runs",
        source="aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp: mha_bwd",
    ),
    Workspace(
        name="workspace of a convolution",
        nbytes=None,
        inside=True,
        note="while one runs; its size follows from the algorithm that cuDNN takes",
        source="aten/src/ATen/native/cudnn/Conv_v8.cpp: run_conv_plan",
        operators=("aten.convolution",),
    ),
    Workspace(
        name="reserve and workspace of recurrent layers",
        nbytes=None,
        inside=True,
        note="the reserve stays until backward, so the real peak is higher; only cuDNN knows the size",
        source="aten/src/ATen/native/cudnn/RNN.cpp: cudnnGetRNNTempSpaceSizes",
        operators=("aten._cudnn_rnn",),
    ),
    Workspace(
        name="device context and loaded kernels",
        nbytes=None,
        inside=False,
        note="see the line outside of evenload estimate, which has measured sizes",
        source="docs/memory.md",
    ),
    Workspace(
        name="buffers of communicators",
        nbytes=None,
        inside=False,
        note="for every process group, outside the allocator",
        source="docs/memory.md",
    ),
)
"""Memory on CUDA devices beside a dry run's."""

CPU_WORKSPACES: Final = (
    Workspace(
        name="scratch of a convolution",
        nbytes=None,
        inside=True,
        note="while one runs, copies in the layout of oneDNN: up to about what it reads and writes; for fp64 columns: "
        "the image once for every element of the kernel",
        source="aten/src/ATen/native/mkldnn/Conv.cpp, ConvolutionMM2d.cpp",
        operators=("aten.convolution",),
    ),
    Workspace(
        name="scratch of a layer of LSTM",
        nbytes=None,
        inside=True,
        note="while one runs, weights in the layout of oneDNN and sums of gates: up to about what it reads and writes",
        source="oneDNN, src/cpu/rnn/rnn_utils.cpp: set_offsets",
        operators=("aten.mkldnn_rnn_layer",),
    ),
    Workspace(
        name="scratch of resizing an image",
        nbytes=None,
        inside=True,
        note="while it runs, what it reads and writes with the channels last",
        source="aten/src/ATen/native/cpu/UpSampleKernel.cpp",
        operators=("aten.upsample_", "aten._upsample_"),
    ),
    Workspace(
        name="scratch of fused attention",
        nbytes=None,
        inside=True,
        note="while it runs, blocks of scores for every thread",
        source="aten/src/ATen/native/cpu/FlashAttentionKernel.cpp",
        operators=("aten._scaled_dot_product_flash_attention_for_cpu",),
    ),
)
"""Memory on the CPU beside a dry run's, as the samples of many operators show it; other kernels need a few KiB."""

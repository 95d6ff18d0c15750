"""The recorder's curve and peak equal the bytes that PyTorch's profiler sees, which knows nothing of how we count."""

import numpy as np
import pytest
import torch
from tests.record.training import train_llama, train_stack
from tests.record.truth import counted_twice
from torch import nn

RUNS = {
    "float32": train_llama,
    "bfloat16": lambda: train_llama(dtype=torch.bfloat16),
    "autocast": lambda: train_llama(autocast=True),
    "scaled dot product attention": lambda: train_llama(attn_implementation="sdpa"),
    "adamw in a loop": lambda: train_llama(optimizer="loop"),
    "adamw fused": lambda: train_llama(optimizer="fused"),
    "gradient accumulation": lambda: train_llama(accumulate=2),
    "custom function": train_stack,
}
CHECKPOINTED = {
    "checkpointing": lambda: train_llama(checkpointing=True),
    "reentrant checkpointing": lambda: train_llama(checkpointing="reentrant"),
    "checkpointing with autocast": lambda: train_llama(checkpointing=True, autocast=True, optimizer="loop"),
    "nested checkpointing": lambda: train_stack(nested=True),
}


@pytest.mark.parametrize("name", [*RUNS, *CHECKPOINTED])
def test_the_curve_equals_the_profiler_after_every_operator(name):
    both = counted_twice(lambda _: (RUNS | CHECKPOINTED)[name]())
    np.testing.assert_array_equal(both.recorded_levels, both.profiler_levels)
    assert len(both.recorded_levels) > 100
    if name in RUNS:
        assert both.peak == both.profiler_peak
    else:
        assert 0 <= both.profiler_peak - both.peak <= 1e-4 * both.profiler_peak


def test_what_numbers_need_inside_a_kernel_is_all_that_is_not_seen():
    # With few tokens the peak lies in the optimizer, where a kernel makes tensors of 8 + 4 bytes out of numbers.
    both = counted_twice(lambda _: train_llama(tokens=(1, 8)))
    np.testing.assert_array_equal(both.recorded_levels, both.profiler_levels)
    assert 0 <= both.profiler_peak - both.peak <= 12


def test_a_number_that_backward_needs_is_a_tensor_that_no_operator_makes():
    # Eager attention multiplies by its scale, and autograd keeps that number as a tensor of 8 bytes in every layer.
    both = counted_twice(lambda _: train_llama(attn_implementation="eager", layers=2))
    missing = both.profiler_levels - both.recorded_levels
    assert set(missing.tolist()) == {0, 8, 16}
    assert missing[-1] == 0


def test_copies_inside_a_kernel_are_not_seen_but_end_with_it():
    # On the CPU, a product of two types copies one of them inside the kernel.
    def run(_):
        (torch.ones(64, 64) * torch.ones(64, 64, dtype=torch.bool)).sum()

    both = counted_twice(run)
    np.testing.assert_array_equal(both.recorded_levels, both.profiler_levels)
    assert both.profiler_peak - both.peak == 64 * 64 * 4


def test_storages_that_change_their_size_keep_the_curve():
    def run(_):
        grown = torch.empty(0)
        grown.resize_(1000)
        grown.resize_(5000)
        storage = torch.ones(4000).untyped_storage()
        storage.resize_(0)
        storage.resize_(64)
        into = torch.empty(0)
        torch.add(torch.ones(700), torch.ones(700), out=into)
        taken = torch.empty(0).set_(torch.ones(90))
        taken.add_(1)
        torch.stack([grown[:9], taken[:9]])

    both = counted_twice(run)
    np.testing.assert_array_equal(both.recorded_levels, both.profiler_levels)
    assert both.profiler_levels[-1] > 0


def test_sparse_gradients_are_counted_by_their_parts():
    def run(_):
        table = nn.Embedding(100, 16, sparse=True)
        for _ in range(2):
            table(torch.tensor([1, 5, 5])).sum().backward()
            table.zero_grad()

    both = counted_twice(run)
    np.testing.assert_array_equal(both.recorded_levels, both.profiler_levels)


def test_a_convolutional_network_with_statistics_and_dropout_is_exact():
    def run(_):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(0.5), nn.Flatten()
        )
        head = nn.Linear(8 * 7 * 7, 4)
        sgd = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
        for _ in range(3):
            loss = nn.functional.cross_entropy(head(model(torch.randn(16, 3, 16, 16))), torch.randint(0, 4, (16,)))
            sgd.zero_grad()
            loss.backward()
            sgd.step()
        model.eval()
        with torch.no_grad():
            head(model(torch.randn(16, 3, 16, 16)))

    both = counted_twice(run)
    np.testing.assert_array_equal(both.recorded_levels, both.profiler_levels)


def test_a_backward_of_a_backward_is_exact():
    def run(_):
        x = torch.randn(64, 64, requires_grad=True)
        (gradient,) = torch.autograd.grad((x @ x).relu().sum(), x, create_graph=True)
        (gradient**2).sum().backward()

    both = counted_twice(run)
    np.testing.assert_array_equal(both.recorded_levels, both.profiler_levels)
    assert both.peak == both.profiler_peak

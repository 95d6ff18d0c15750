"""Data parallelism: stages of ZeRO that PyTorch has, and what it has not."""

from __future__ import annotations

import pytest

from evenload.errors import EvenloadError
from evenload.runtime.sharding import check_sharding
from evenload.setup import Setup


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_two_replicas_have_the_gradients_of_one_with_both_batches(both, zero):
    for results in both("data_parallel"):
        assert results[zero] < 1e-5


@pytest.mark.parametrize(
    ("setup", "told"),
    [
        (Setup(dp=2, zero=1), "zero is 1"),
        (Setup(dp=2, tp=2), "DistributedDataParallel takes no parameters"),
        (Setup(dp=2, pp=2), "DistributedDataParallel takes no parameters"),
    ],
)
def test_what_pytorch_does_not_divide_is_refused(setup, told):
    with pytest.raises(EvenloadError) as error:
        check_sharding(setup)
    assert told in str(error.value)
    assert "use zero 2 or 3" in error.value.fix


def test_without_replicas_every_stage_is_the_same():
    for zero in (0, 1, 2, 3):
        check_sharding(Setup(zero=zero))

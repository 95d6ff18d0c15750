from __future__ import annotations

import pytest

from evenload.errors import EvenloadError
from evenload.setup import Setup


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        ({"tp": 1}, (1, 1)),
        ({"tp": 8}, (8, 1)),
        ({"tp": 8, "dp": 4}, (8, 4)),
        ({"tp": 8, "dp": 4, "ep": 4}, (8, 1)),
        ({"tp": 8, "dp": 4, "ep": 8}, (4, 1)),
        ({"tp": 8, "dp": 4, "ep": 32}, (1, 1)),
        ({"tp": 2, "cp": 2, "dp": 4, "ep": 8}, (2, 1)),
        ({"tp": 2, "dp": 8, "ep": 4, "etp": 1}, (1, 4)),
    ],
)
def test_experts_take_the_ranks_of_a_stage_that_are_there(degrees, expected):
    setup = Setup(**degrees)
    assert (setup.expert_tp, setup.expert_dp) == expected
    assert setup.ep * setup.expert_tp * setup.expert_dp == setup.tp * setup.cp * setup.dp


@pytest.mark.parametrize(
    ("backend", "tp", "rows"),
    [("torch", 1, 32001), ("torch", 8, 4001), ("megatron", 1, 32128), ("megatron", 8, 4096), ("mindspore", 8, 4001)],
)
def test_the_vocabulary_is_padded_over_the_tensor_ranks(backend, tp, rows):
    assert Setup(tp=tp, backend=backend).vocabulary_rows(32001) == rows


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2"])
def test_a_degree_that_is_no_positive_whole_number_is_an_error(value):
    for name in ("tp", "etp"):
        with pytest.raises(EvenloadError, match=rf"\$\.{name}: {name} is "):
            Setup(**{name: value})

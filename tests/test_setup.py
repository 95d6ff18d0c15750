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


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("dtype", "bf17", "did you mean 'bf16'?"),
        ("dtype", 16, "use one of fp32, bf16, fp16, fp8"),
        ("dtype", ["bf16"], "use one of"),
        ("grad_dtype", "double", "use one of fp32"),
        ("optimizer", "adam", "did you mean 'adamw'?"),
        ("zero", 4, "use one of 0, 1, 2, 3"),
        ("zero", True, "use one of 0, 1, 2, 3"),
        ("backend", "pytorch", "did you mean 'torch'?"),
        ("attention", None, "use one of sdpa, eager"),
        ("sequence_parallel", 1, "give true or false"),
        ("sequence_parallel", None, "give true or false"),
        ("master_weights", "yes", "give true or false"),
    ],
)
def test_a_word_that_is_not_known_is_an_error(name, value, fix):
    with pytest.raises(EvenloadError, match=rf"\$\.{name}: {name} is ") as caught:
        Setup(tp=2, **{name: value})
    assert fix in caught.value.fix

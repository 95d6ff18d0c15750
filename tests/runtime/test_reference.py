"""The built-in model is Hugging Face's Llama."""

from __future__ import annotations

import pytest
import torch
from tests.runtime.models import SIZES, hugging_face, reference

from evenload.errors import EvenloadError
from evenload.runtime.reference import read_sizes


def test_it_computes_what_hugging_face_computes():
    theirs, mine = hugging_face(layers=3), reference(3)
    mine.load_state_dict(theirs.state_dict())
    tokens = torch.randint(0, 90, (2, 16))
    torch.testing.assert_close(mine(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "qwen3_moe"}, "none of the type 'qwen3_moe'"),
        ({"rope_scaling": {"factor": 8.0}}, "knows no rope_scaling"),
        ({"vocab_size": True}, "vocab_size is true"),
        ({"num_hidden_layers": None}, "num_hidden_layers is null"),
        ({"num_key_value_heads": 3}, "4 heads of width 8 with 3 keys"),
    ],
)
def test_configurations_that_it_cannot_be_built_from_are_refused(change, says):
    with pytest.raises(EvenloadError, match=says):
        read_sizes({**SIZES, "num_hidden_layers": 2, **change})

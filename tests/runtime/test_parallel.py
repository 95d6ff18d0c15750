"""Tensor and sequence parallelism of decoders of transformers: two processes compute what one does."""

from __future__ import annotations

import pytest
import torch
from tests.runtime import pair
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from evenload.errors import EvenloadError
from evenload.record.hugging_face import model_builder
from evenload.runtime.parallel import apply_tensor_parallel
from evenload.runtime.parts import check_complete, find_parts


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("family", pair.FAMILIES)
def test_two_ranks_have_the_loss_and_the_gradients_of_one(both, family, sequence):
    for results in both("tensor_parallel"):
        found = results[family, sequence]
        assert found["loss"] < 1e-5
        assert found["gradients"] < 1e-5
        assert found["all"]
        assert found["local"] < 0.53 * found["whole"]  # norms and biases after sums are on every rank


@pytest.fixture
def four():
    """A mesh of four ranks that do not exist."""
    distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (4,))
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("llama", {"num_key_value_heads": 2}, "tp 4 does not divide the 2 heads of layer 0.self_attn.k_proj"),
        (
            "llama",
            {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48},
            "tp 4 does not divide the 6 heads of layer 0.self_attn.q_proj",
        ),
        ("llama", {"intermediate_size": 66}, "tp 4 does not divide the 66 columns of layer 0.mlp"),
        ("llama", {"vocab_size": 130}, "tp 4 does not divide the 130 rows of the embedding"),
        ("qwen3_moe", {}, "does not know how to divide layer 0.mlp, a mixture of experts"),
        ("mixtral", {}, "does not know how to divide layer 0.mlp, a mixture of experts"),
        ("deepseek_v3", {}, "does not know how to divide layer 0.self_attn, DeepseekV3Attention"),
        ("olmo2", {}, "does not know how to divide layer 0.self_attn.q_norm, Olmo2RMSNorm"),
        ("gpt2", {}, "transformer.wpe (Embedding) holds parameters and is neither embedding, layer, norm nor head"),
    ],
)
def test_what_cannot_be_divided_is_named(four, family, changes, told):
    config = {**pair.SMALL, "num_key_value_heads": 4, "model_type": family, "pad_token_id": 0, **changes}
    with torch.device("meta"):
        model = model_builder(config, dtype=torch.float32)()
    parts = find_parts(model)

    def divide():
        check_complete(model, parts)
        apply_tensor_parallel(parts, four)

    with pytest.raises(EvenloadError) as error:
        divide()
    assert told in str(error.value)
    assert error.value.fix


def test_a_mesh_of_one_changes_nothing():
    distributed.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        model = pair.build()
        apply_tensor_parallel(find_parts(model), init_device_mesh("cpu", (1,)))
        assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
    finally:
        distributed.destroy_process_group()

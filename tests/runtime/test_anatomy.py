"""What a decoder is made of, seen from one run on fake tensors."""

from __future__ import annotations

import pytest
import torch
from tests.runtime.models import FAMILIES, hugging_face, reference
from torch import nn

from evenload.errors import EvenloadError
from evenload.runtime.examine import examine

TOKENS = torch.zeros((2, 16), dtype=torch.int64)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.inner(x)


class Own(nn.Module):
    """A user's decoder with a parameter of its own; `run` says what happens round the layers."""

    def __init__(self, run=None) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.positions = nn.Parameter(torch.randn(16, 8))
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 10)
        self.run = run

    def forward(self, tokens):
        x = first = self.embed(tokens) + self.positions
        for number, block in enumerate(self.blocks):
            if self.run == "between" and number:
                x = x * 2
            x = block(x)
        if self.run == "around":
            x = x + first
        return self.head(x * self.scale)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ends_of_hugging_face_models_are_found(family):
    model = hugging_face(family, layers=2)
    found = examine(model, (TOKENS,))
    assert len(found.layers) == 2
    outer = {name for name, _ in model.named_parameters() if not name.startswith(found.layers)}
    assert found.before | found.after == outer
    assert not found.before & found.after
    assert any("embed" in name for name in found.before)
    assert "lm_head.weight" in found.after
    assert found.hidden.shape == (2, 16, 32)


def test_parameters_that_a_model_holds_itself_are_found_where_they_are_used():
    found = examine(Own(), (TOKENS,))
    assert found.before == {"embed.weight", "positions"}
    assert found.after == {"scale", "head.weight", "head.bias"}


def test_a_tied_embedding_is_seen():
    found = examine(reference(2, tie_word_embeddings=True), (TOKENS,))
    assert found.tied == (("model.embed_tokens.weight", "lm_head.weight"),)


def test_the_type_of_what_passes_is_that_of_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        found = examine(Own(), (TOKENS,))
    assert found.hidden.dtype is torch.float32
    assert found.result.dtype is torch.bfloat16


def test_the_model_stays_as_it_is():
    model = Own()
    examine(model, (TOKENS,))
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("run", "says"), [("between", "something happens to what passes"), ("around", "goes round the layers")]
)
def test_a_model_that_cannot_be_cut_is_refused(run, says):
    with pytest.raises(EvenloadError, match=says):
        examine(Own(run), (TOKENS,))


def test_layers_that_share_a_parameter_are_refused():
    model = Own()
    model.blocks[2] = model.blocks[0]
    with pytest.raises(EvenloadError, match="share the parameter"):
        examine(model, (TOKENS,))


def test_a_second_tensor_with_gradients_is_refused():
    class Two(Own):
        def forward(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x, other=self.positions)
            return self.head(x)

    class Taking(Layer):
        def forward(self, x, other):
            return x + self.inner(x) + other

    model = Two()
    model.blocks = nn.ModuleList(Taking() for _ in range(2))
    with pytest.raises(EvenloadError, match="gets a second tensor that gradients flow through"):
        examine(model, (TOKENS,))


def test_a_model_without_repeated_layers_is_refused():
    with pytest.raises(EvenloadError, match="no repeated layers"):
        examine(nn.Linear(4, 4), (torch.zeros(2, 4),))


def test_a_wrong_path_of_layers_gets_a_suggestion():
    with pytest.raises(EvenloadError, match=r"did you mean 'model\.layers'"):
        examine(reference(2), (TOKENS,), "model.layer")

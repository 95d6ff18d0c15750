"""Chunks of a model run one after the other are the model; none has parameters of another."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.runtime.models import FAMILIES, hugging_face, reference
from tests.runtime.test_anatomy import TOKENS, Own

from evenload.errors import EvenloadError
from evenload.plan.layout import Layout
from evenload.runtime.anatomy import take_result
from evenload.runtime.examine import examine
from evenload.runtime.materials import Materials
from evenload.runtime.placement import places
from evenload.runtime.skeleton import without_parameters
from evenload.runtime.stages import make_chunk

CPU = torch.device("cpu")


def chunks_of(model, table):
    anatomy = examine(model, (TOKENS,))
    materials = Materials(model, CPU, seed=0, init=None)
    chunks = [make_chunk(materials, place, anatomy) for place in places(Layout.from_counts(table))]
    for chunk in chunks:
        materials.fill(chunk.model, chunk.full_names)
    return chunks


def run(chunks, tokens):
    hidden = None
    for chunk in chunks:
        hidden = chunk(hidden, tokens=tokens)
    return hidden


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("table", [[1, 2, 0], [[2, 0], [0, 1]]])
def test_chunks_of_hugging_face_models_are_the_model(family, table):
    model = hugging_face(family, layers=3)
    tokens = torch.randint(0, 90, (2, 16))
    chunks = chunks_of(model, table)
    result, expected = run(chunks, tokens), take_result(model(tokens))
    assert torch.equal(result, expected)
    gradients = torch.autograd.grad(expected.square().sum(), list(model.parameters()), allow_unused=True)
    result.square().sum().backward()
    for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        assert gradient is None or torch.equal(parameter.grad, gradient), name


def test_chunks_of_a_users_model_are_the_model():
    model, tokens = Own(), torch.randint(0, 10, (2, 16))
    assert torch.equal(run(chunks_of(model, [1, 1, 1]), tokens), model(tokens))


def test_every_parameter_is_in_one_chunk_and_keeps_its_name():
    model = reference(5)
    chunks = chunks_of(model, [[2, 0], [1, 2]])
    found = {
        chunk.full_names[name.removeprefix("model.")]: parameter
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
    }
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(parameter is found[name] for name, parameter in model.named_parameters())


def test_chunks_without_an_end_have_no_memory_for_it():
    with without_parameters():
        model = reference(3)
    first, middle, last = chunks_of(model, [1, 1, 1])
    for chunk in (first, middle, last):
        assert not any(parameter.is_meta for parameter in chunk.parameters())
    count = sum(p.numel() for p in middle.parameters())
    assert count == sum(p.numel() for p in model.model.layers[1].parameters())
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_model_made_without_values_still_has_its_buffers():
    with without_parameters():
        model = reference(2)
    assert not model.model.rotary_emb.inverse.is_meta
    assert torch.equal(model.model.rotary_emb.inverse, reference(2).model.rotary_emb.inverse)


def test_ties_survive_the_loss_of_values():
    with without_parameters():
        model = hugging_face(layers=2, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.is_meta


def test_hugging_face_models_begin_as_their_class_says():
    with without_parameters():
        model = hugging_face(layers=2)
    (chunk,) = chunks_of(model, [2])
    assert chunk.model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(chunk.model.model.norm.weight, torch.ones(32))


def test_the_given_model_keeps_its_structure():
    model = reference(4)
    before = copy.deepcopy(model)
    chunks_of(model, [2, 2])
    assert [name for name, _ in model.named_modules()] == [name for name, _ in before.named_modules()]
    assert not any(module._forward_hooks for module in model.modules())


def test_values_of_own_modules_need_a_way_to_begin():
    with without_parameters():
        model = Own()
    with pytest.raises(EvenloadError, match="nobody knows how the parameters of the model"):
        chunks_of(model, [1, 2])


def test_a_model_on_meta_is_refused_for_its_buffers():
    with torch.device("meta"):
        model = reference(2)
    with pytest.raises(EvenloadError, match=r"buffer 'model\.rotary_emb\.inverse' has no values"):
        Materials(model, CPU, seed=0, init=None)

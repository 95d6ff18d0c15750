"""What models do while they are built: initialize, copy layers, work out numbers; and how layers are told apart."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from tests.record.events import signed_events
from torch import nn

import evenload
from evenload.errors import EvenloadError
from evenload.ledger.words import CATEGORIES, Category
from evenload.record.layers import find_layers

torch.set_num_threads(1)


class Chain(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.blocks = nn.ModuleList(layers)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def truncated():
    layer = nn.Linear(16, 16)
    nn.init.trunc_normal_(layer.weight, std=0.02)
    nn.init.trunc_normal_(layer.weight, std=0.5, a=0.4, b=0.5)
    return Chain([layer])


def copies():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 3)


def tied_copies():
    pair = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    pair[1].weight = pair[0].weight
    return Chain(copy.deepcopy(pair) for _ in range(3))


def rates():
    return Chain(nn.Dropout(rate.item()) if rate < 0.2 else nn.Linear(16, 16) for rate in torch.linspace(0, 0.4, 8))


def counts():
    widths = (torch.tensor([1, 2, 3]) * 16).tolist()
    widths[int(torch.arange(4).sum() - 4)] = int(torch.full((), 48.5))
    return Chain(nn.Linear(*pair) for pair in zip([16, *widths], [*widths, 16], strict=True))


def written():
    numbers = torch.zeros(4)
    part = numbers[1:]
    part += 2
    return Chain(nn.Linear(16, 16) for _ in range(int(numbers.sum())))


@pytest.mark.parametrize("build", [truncated, copies, tied_copies, rates, counts, written])
def test_a_model_that_needs_something_while_it_is_built_runs_as_it_does_for_real(build):
    def batch():
        return torch.randn(2, 8, 16)

    model = build()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with evenload.record(model=model, optimizer=sgd) as recording:
        for _ in range(2):
            x = batch()
            loss = model(x).sum()
            del x
            loss.backward()
            del loss
            sgd.step()
            sgd.zero_grad()
    dry = evenload.dryrun(build, device="cpu", inputs=batch, optimizer=partial(torch.optim.SGD, lr=0.1))
    np.testing.assert_array_equal(signed_events(dry, since=0), signed_events(recording.ledger, since=0))


@pytest.mark.parametrize("chance", [lambda: torch.rand(3).sum(), lambda: torch.zeros(3).add_(torch.rand(3)).sum()])
def test_what_is_drawn_by_chance_while_a_model_is_built_is_not_known(chance):
    with pytest.raises(EvenloadError, match="needs the data of a tensor"):
        evenload.dryrun(lambda: Chain([nn.Dropout(chance().item())]), inputs=torch.empty(4, 16), device="cpu")


class Hidden(nn.Module):
    """A layer that does what an attribute says."""

    def __init__(self, how=None):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self._how = how

    def forward(self, x):
        return self.inner(x)


def swish(x):
    return x * x.sigmoid()


def scaled(number):
    return lambda x: x * number


def plain(_number):
    return Hidden()


def named(number):
    return Hidden(how={"activation": ("relu",) if number != 5 else ("gelu",)})


def function(number):
    return Hidden(how=torch.relu if number != 5 else swish)


def closure(number):
    return Hidden(how=scaled(2.0 if number != 5 else 3.0))


def given(number):
    return Hidden(how=partial(torch.nn.functional.dropout, p=0.0 if number != 5 else 0.5))


def type_of(number):
    return Hidden(how=torch.float32 if number != 5 else torch.bfloat16)


def hooked(number):
    layer = Hidden()
    layer.register_forward_hook(lambda _module, _args, out: out * 1)
    if number == 5:
        layer.inner.register_forward_hook(lambda _module, _args, out: out.exp())
    return layer


def patched(number):
    layer = Hidden()
    if number == 5:
        forward = layer.forward
        layer.forward = lambda x: forward(x).exp().sin()
    return layer


@pytest.mark.parametrize("layer", [named, function, closure, given, type_of, hooked, patched])
def test_a_layer_that_differs_in_anything_that_can_be_seen_is_of_another_kind(layer):
    kinds = find_layers(Chain(layer(number) for number in range(10))).kinds
    assert kinds == (0, 0, 0, 0, 0, 5, 0, 0, 0, 0)


@pytest.mark.parametrize("layer", [plain, lambda _: hooked(0), lambda _: closure(0), lambda _: patched(5)])
def test_layers_that_are_made_alike_are_of_one_kind(layer):
    assert set(find_layers(Chain(layer(number) for number in range(10))).kinds) == {0}


@pytest.mark.parametrize("layer", [hooked, patched])
def test_the_layer_that_differs_is_run(layer):
    few, full = (
        evenload.dryrun(
            lambda: Chain(layer(number) for number in range(12)), inputs=torch.empty(4, 16), full=full, optimizer="sgd"
        )
        for full in (False, True)
    )
    np.testing.assert_array_equal(signed_events(few), signed_events(full))


@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_a_mask_that_masks_nothing_costs_nothing(model_type):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(model_type, vocab_size=128, **sizes)
    make = AutoModelForCausalLM if model_type == "llama" else AutoModelForMaskedLM

    def batch():
        tokens = torch.zeros(2, 32, dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}

    def build():
        model = make.from_config(config)
        model.config.use_cache = False
        return model

    model = build()
    with evenload.record(model=model) as recording:
        for _ in range(2):
            model(**batch()).loss.backward()
            recording.step()
            model.zero_grad()
    dry = evenload.dryrun(build, device="cpu", inputs=batch, optimizer="none")
    peaks = [
        ledger.allocations.nbytes[ledger.allocations.category == CATEGORIES.index(Category.ACTIVATION)].sum()
        for ledger in (dry, recording.ledger)
    ]
    assert peaks[0] == peaks[1]
    on_gpu = evenload.dryrun(build, device="cuda", inputs=batch, optimizer="none")
    largest = max(
        int(on_gpu.allocations.nbytes[row])
        for row in range(len(on_gpu.allocations))
        if "efficient_attention" in (on_gpu.operator(row) or "") or "flash" in (on_gpu.operator(row) or "")
    )
    assert largest <= 2 * 4 * 32 * 8 * 4


def test_experts_multiply_in_every_type():
    from transformers import AutoModelForCausalLM, MixtralConfig

    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=64,
        use_cache=False,
    )

    def batch():
        tokens = torch.arange(32).reshape(2, 16)
        return {"input_ids": tokens, "labels": tokens}

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with evenload.record(model=model) as recording:
            for _ in range(2):
                model(**batch()).loss.backward()
                recording.step()
                model.zero_grad()
        dry = evenload.dryrun(
            lambda dtype=dtype: AutoModelForCausalLM.from_config(config, dtype=dtype),
            device="cpu",
            inputs=batch,
            optimizer="none",
        )
        np.testing.assert_array_equal(signed_events(dry), signed_events(recording.ledger))

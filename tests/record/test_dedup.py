"""A run of few layers, composed, is the run of all of them: event for event, row for row."""

from collections import Counter, OrderedDict
from functools import cache

import numpy as np
import pytest
import torch
from tests.record.events import signed_events
from torch import nn

import evenload
from evenload.errors import EvenloadError
from evenload.ledger.curve import curve, peaks
from evenload.ledger.words import CATEGORIES, PHASES, MarkKind
from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy
from evenload.record.layers import find_layers, only
from evenload.record.pieces import cut, in_order, segments
from evenload.record.planned import prepare_plan
from evenload.record.rehearsal import Rehearsal
from evenload.record.targets import find_target
from evenload.setup import Setup
from evenload.simulate.composition import compose, reduction

torch.set_num_threads(1)

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
LLAMA = {"model_type": "llama", "intermediate_size": 176, "num_hidden_layers": 9, **SIZES}
QWEN_MOE = {
    "model_type": "qwen3_moe",
    "intermediate_size": 176,
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "num_hidden_layers": 8,
    **SIZES,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "intermediate_size": 176,
    "moe_intermediate_size": 48,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "num_hidden_layers": 9,
    **SIZES,
    "num_key_value_heads": 4,
}
GEMMA = {
    "model_type": "gemma2",
    "intermediate_size": 176,
    "head_dim": 16,
    "sliding_window": 32,
    "num_hidden_layers": 12,
    **SIZES,
}
CASES = {
    "llama": (LLAMA, {}),
    "llama, recomputed": (LLAMA, {"recompute": range(9)}),
    "llama, some layers recomputed": (LLAMA, {"recompute": range(6)}),
    "llama, layers in the middle recomputed": (LLAMA, {"recompute": range(2, 7)}),
    "llama, gradient accumulation": (LLAMA, {"micro_batches": 3}),
    "llama, sgd": (LLAMA, {"optimizer": "sgd"}),
    "llama, adamw in a loop": (LLAMA, {"optimizer": "adamw-loop"}),
    "llama, adamw fused": (LLAMA, {"optimizer": "adamw-fused"}),
    "llama, autocast": (LLAMA, {"autocast": torch.bfloat16, "dtype": "fp32"}),
    "mixture of experts": (QWEN_MOE, {}),
    "mixture of experts, recomputed": (QWEN_MOE, {"recompute": range(8)}),
    "dense layers, then experts": (DEEPSEEK, {}),
    "dense layers, then experts, recomputed": (DEEPSEEK, {"recompute": range(9)}),
    "two kinds in turn": (GEMMA, {}),
}


@cache
def run(name, *, full):
    config, options = CASES[name]
    layers = config["num_hidden_layers"]
    options = dict(options)
    recompute = frozenset(options.pop("recompute", ()))
    micro_batches, dtype = options.pop("micro_batches", 1), options.pop("dtype", "bf16")
    setup = Setup(seq=64, micro_batch=2, micro_batches=micro_batches, dtype=dtype)
    plan = Plan(setup=setup, layout=Layout.even(layers, pp=1), policy=Policy(full=recompute))
    return prepare_plan(config, plan, full=full, **options)()


def rows(ledger):
    """What is in a ledger, whatever its order."""
    columns = ledger.allocations
    return Counter(
        (
            int(columns.nbytes[row]),
            ledger.module(row),
            ledger.operator(row),
            ledger.devices[columns.device[row]],
            CATEGORIES[columns.category[row]],
            PHASES[columns.phase[row]],
            int(columns.micro_batch[row]),
        )
        for row in range(len(columns))
    )


@pytest.mark.parametrize("name", CASES)
def test_the_composed_run_is_the_full_run_event_for_event(name):
    full, few = run(name, full=True), run(name, full=False)
    assert any(mark.kind is MarkKind.NOTE and "traced layers" in mark.text for mark in few.marks)
    np.testing.assert_array_equal(signed_events(few), signed_events(full))
    assert peaks(few).held == peaks(full).held
    assert peaks(few).needed == peaks(full).needed
    np.testing.assert_array_equal(curve(in_order(few)).level, curve(in_order(full)).level)


@pytest.mark.parametrize("name", CASES)
def test_the_composed_run_has_the_rows_and_marks_of_the_full_run(name):
    full, few = run(name, full=True), run(name, full=False)
    assert rows(few) == rows(full)

    def marks(ledger):
        return [(m.kind, m.value, m.micro_batch) for m in ledger.marks if m.kind is not MarkKind.NOTE]

    assert marks(few) == marks(full)


@pytest.mark.parametrize("name", ["llama", "llama, recomputed", "mixture of experts", "mixture of experts, recomputed"])
def test_segments_of_the_traced_layers_are_composed_into_the_full_timeline(name):
    # The pieces of a full run of all layers, thinned out to those of a few, hold everything that the whole needs.
    full = in_order(run(name, full=True))
    path = "model.layers"
    pieces = cut(full, path)
    of_pieces = segments(full, pieces)
    reduced = reduction(["same"] * (max(pieces.layer) + 1))
    kept = [i for i, layer in enumerate(pieces.layer) if layer < 0 or layer in reduced.traced]
    traced = [pieces.layer[i] if pieces.layer[i] < 0 else reduced.traced.index(pieces.layer[i]) for i in kept]
    events = compose(traced, reduced).events([of_pieces[i] for i in kept])
    whole = np.concatenate([np.array(segment.events) for segment in of_pieces])
    np.testing.assert_array_equal(events, whole)
    assert events.cumsum().max() == curve(full).peak


class Odd(nn.Module):
    """A layer that looks at its number, which nobody can see from outside."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        return self.inner(x) if self.number % 2 else self.inner(x.tanh())


class Layered(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(16, 16)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Counted(Layered):
    def forward(self, x):
        for number in range(10):
            x = self.blocks[number](x)
        return x


class Residual(nn.Module):
    """Keeps a result for a layer far away."""

    def forward(self, x, shelf):
        shelf.append(x.exp())
        return x + shelf[max(0, len(shelf) - 4)]


class Far(Layered):
    def forward(self, x):
        shelf = []
        for block in self.blocks:
            x = block(x, shelf)
        return self.head(x)


MODELS = {
    "layers that look at their number": lambda: Layered(Odd(i) for i in range(10)),
    "layers that are counted": lambda: Counted(nn.Linear(16, 16) for _ in range(10)),
    "layers that keep the memory of distant ones": lambda: Far(Residual() for _ in range(12)),
    "layers that share a weight": lambda: Layered([nn.Linear(16, 16)] * 9),
    "few layers": lambda: Layered(nn.Linear(16, 16) for _ in range(3)),
    "plain layers": lambda: Layered(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(9)),
    "nothing after the layers": lambda: nn.Sequential(nn.Linear(16, 16), Only(nn.Linear(16, 16) for _ in range(9))),
}


class Only(nn.ModuleList):
    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimizer", ["adamw", "adamw-loop", "sgd"])
def test_whatever_layers_do_the_answer_is_that_of_a_full_run(name, optimizer):
    few, full = (
        evenload.dryrun(MODELS[name], inputs=torch.empty(4, 16, requires_grad=True), full=full, optimizer=optimizer)
        for full in (False, True)
    )
    np.testing.assert_array_equal(signed_events(few), signed_events(full))
    assert peaks(few).held == peaks(full).held
    assert rows(few) == rows(full)


def test_the_list_of_layers_may_be_named():
    def build():
        model = Layered(nn.Linear(16, 16) for _ in range(9))
        model.towers = nn.ModuleList(nn.Linear(512, 512) for _ in range(2))
        return model

    with Rehearsal(find_target("cuda")):
        assert find_layers(build()).path == "towers"
        assert find_layers(build(), "blocks").path == "blocks"
    ledger = evenload.dryrun(build, inputs=torch.empty(4, 16), layers="blocks")
    assert [mark.text for mark in ledger.marks if mark.text] == ["traced layers 0, 1, 7, 8 of 9"]
    with pytest.raises(EvenloadError, match="no list of layers at 'block'") as caught:
        evenload.dryrun(build, inputs=torch.empty(4, 16), layers="block")
    assert "did you mean 'blocks'" in caught.value.fix
    with pytest.raises(EvenloadError, match="no list of layers at 'blocks'"):
        evenload.dryrun(lambda: nn.Linear(16, 16), inputs=torch.empty(4, 16), layers="blocks")


class Numbered(nn.Module):
    def __init__(self, number=0):
        super().__init__()
        self.layer_idx, self.inner = number, nn.Linear(16, 16)

    def forward(self, x):
        return x + self.inner(x).relu()


def blocks(count=8):
    return (Numbered(number) for number in range(count))


@pytest.mark.parametrize(
    ("build", "path", "layers"),
    [
        (lambda: nn.Sequential(*blocks()), "", 4),
        (lambda: nn.Sequential(nn.Linear(16, 16), *blocks(), nn.Linear(16, 16)), "", 6),
        (lambda: nn.Sequential(nn.Linear(16, 16), nn.Sequential(*blocks())), "1", 4),
        (lambda: nn.Sequential(nn.Sequential(*blocks(6)), nn.Sequential(*blocks())), "1", 4),
        (lambda: nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(8))), "", 4),
        (lambda: Layered(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(8)), "blocks", 4),
    ],
)
def test_a_sequence_of_blocks_is_found(build, path, layers):
    assert find_layers(build()).path == path
    few, full = (evenload.dryrun(build, inputs=torch.empty(4, 16), full=full) for full in (False, True))
    (note,) = [mark.text for mark in few.marks if mark.text]
    assert len(note.partition(" of ")[0].split(",")) == layers
    np.testing.assert_array_equal(signed_events(few), signed_events(full))
    assert rows(few) == rows(full)


def test_layers_of_pytorch_in_a_row_are_no_blocks_until_they_are_named():
    def build():
        return nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))

    found, named = (evenload.dryrun(build, inputs=torch.empty(4, 16), layers=layers) for layers in (None, ""))
    assert not [mark.text for mark in found.marks if mark.text]
    assert [mark.text for mark in named.marks if mark.text] == ["traced layers 0, 1, 6, 7 of 8"]
    assert peaks(named).held == peaks(found).held


def test_a_sequence_with_names_is_no_list():
    model = nn.Sequential(OrderedDict((f"layer{number}", block) for number, block in enumerate(blocks())))
    evenload.dryrun(model, inputs=torch.empty(4, 16))
    with pytest.raises(EvenloadError, match="no list of layers"):
        evenload.dryrun(model, inputs=torch.empty(4, 16), layers="")


def test_layers_in_a_dictionary_by_number_are_found_and_put_back():
    class Keyed(Layered):
        def forward(self, x):
            for block in self.blocks.values():
                x = block(x)
            return x

    model = Keyed(blocks())
    model.blocks = nn.ModuleDict({str(number): block for number, block in enumerate(blocks())})
    before = list(model.blocks.items())
    few, full = (evenload.dryrun(model, inputs=torch.empty(4, 16), full=full) for full in (False, True))
    assert rows(few) == rows(full)
    with only(model, found := find_layers(model), [0, 7]):
        assert list(model.blocks) == ["0", "1"]
        assert len(found) == 2
    assert list(model.blocks.items()) == before


def test_the_configuration_of_the_user_is_put_back():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{**LLAMA, "use_cache": False})
    before = config.to_dict()
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    evenload.dryrun(lambda: LlamaForCausalLM(config), inputs={"input_ids": tokens, "labels": tokens})
    assert config.to_dict() == before

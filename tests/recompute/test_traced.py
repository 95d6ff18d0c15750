"""A traced profile says what the dry run says, and what a formula says where there is one."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from tests.record.test_dedup import DEEPSEEK, GEMMA, LLAMA, QWEN_MOE
from torch import nn

from evenload.errors import EvenloadError
from evenload.ledger.curve import peaks
from evenload.model.huggingface import model_from_config
from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import LayerPolicy, Policy, Recompute
from evenload.profile.buffers import WORKSPACE
from evenload.profile.formula import formula_profile
from evenload.profile.traced import FIRST, LAST
from evenload.recompute.trace_model import trace_model
from evenload.record.dryrun import preparing
from evenload.record.hugging_face import model_builder, token_batches
from evenload.record.rehearsal import Rehearsal
from evenload.record.runs import record_steps
from evenload.record.targets import find_target
from evenload.setup import Setup
from evenload.simulate.costs import chunk_costs
from evenload.simulate.timeline import simulate

torch.set_num_threads(1)
SEQ = 64


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Language(nn.Module):
    """Layers in a list, and one weight at both ends."""

    def __init__(self, layers, *, tied=True):
        super().__init__()
        self.embedding, self.blocks, self.head = nn.Embedding(100, 32), nn.ModuleList(layers), nn.Linear(32, 100)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Convolution(nn.Module):
    """A residual network of equal layers."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 10)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(9)
        )

    def forward(self, images):
        x = self.stem(images)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean((2, 3))).logsumexp(1).sum()


class Sequence(Language):
    """Layers in a Sequential, which calls them."""

    def __init__(self, layers):
        super().__init__([], tied=False)
        self.blocks = nn.Sequential(*layers)

    def forward(self, tokens):
        return nn.functional.cross_entropy(
            self.head(self.blocks(self.embedding(tokens))).flatten(0, 1), tokens.flatten()
        )


class Ends(nn.Sequential):
    """A Sequential of everything."""

    def __init__(self, layers):
        super().__init__(nn.Embedding(100, 32), *layers, nn.Linear(32, 100))


def tokens():
    return torch.zeros(2, SEQ, dtype=torch.int64)


def images():
    return torch.empty(2, 3, 16, 16)


def configured(config, **options):
    build = model_builder(config, **options)
    return {"model_or_builder": build, "inputs": lambda m: token_batches(m, micro_batch=2, seq=SEQ, device="cpu")()}


MODELS = {
    "llama": configured(LLAMA),
    "mixture of experts": configured(QWEN_MOE),
    "dense layers, then experts": configured(DEEPSEEK),
    "two kinds in turn": configured(GEMMA),
    "tied ends": {"model_or_builder": lambda: Language(Block() for _ in range(8)), "inputs": tokens},
    "few layers": {"model_or_builder": lambda: Language([Block(), Block()], tied=False), "inputs": tokens},
    "layers in a sequence": {"model_or_builder": lambda: Sequence(Block() for _ in range(8)), "inputs": tokens},
    "ends in the sequence": {"model_or_builder": lambda: Ends(Block() for _ in range(8)), "inputs": tokens},
    "convolutions": {"model_or_builder": Convolution, "inputs": images},
    "a loop over parameters": configured(LLAMA) | {"optimizer": "adamw-loop"},
    "sgd with autocast": configured(LLAMA, dtype=torch.float32) | {"optimizer": "sgd", "autocast": torch.bfloat16},
}


@cache
def traced(name, micro_batches=2):
    prepare = preparing(device="cuda", micro_batches=micro_batches, **MODELS[name])
    return trace_model(prepare, name=name), prepare


def plan(model, *, pp=1, recompute=Recompute.NONE, micro_batches=2):
    layers = len(model.kinds)
    return Plan(
        setup=Setup(pp=pp, micro_batches=micro_batches, seq=SEQ, micro_batch=2),
        layout=Layout.even(layers, pp=pp),
        policy=Policy.everywhere(recompute, layers),
    )


def predicted(model, **how):
    """Memory of the one rank."""
    asked = plan(model, **how)
    return simulate(model.profile(asked.setup), asked).memory[0]


def missing(memory, prepare):
    """Bytes of the dry run's peak that a prediction lacks."""
    ledger = record_steps(lambda: Rehearsal(find_target("cuda")), prepare, steps=2, full=True)
    return peaks(ledger).held - (memory.peak_allocated - WORKSPACE["h100"])


LOSS = 2 * 4
"""Where the peak lies within the layers, the loss and its gradient are still there, which count with the end."""
QUICK = ("llama", "tied ends", "few layers", "ends in the sequence", "convolutions", "sgd with autocast")


@pytest.mark.parametrize(("name", "micro_batches"), [*((name, 2) for name in MODELS), *((name, 1) for name in QUICK)])
def test_one_stage_needs_what_the_dry_run_needs_to_the_byte(name, micro_batches):
    model, prepare = traced(name, micro_batches)
    memory = predicted(model, micro_batches=micro_batches)
    # the convolutions' model adds something to what each layer returns, which after the last one counts with the end
    allowed = {"convolutions": 1e-4 * memory.peak_allocated, "ends in the sequence": LOSS}
    assert abs(missing(memory, prepare)) <= allowed.get(name, 0)


def heavy(step=None, *, tied=False, length=16, micro_batches=1):
    """A model whose weights outweigh what it keeps, so that the peak can lie in the middle of backward."""
    return preparing(
        lambda: Language([Block() for _ in range(8)], tied=tied),
        step,
        device="cuda",
        inputs=lambda _: torch.zeros(2, length, dtype=torch.int64),
        optimizer="sgd",
        micro_batches=micro_batches,
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("length", [1, 8, 16, 32])
def test_gradients_count_from_the_backward_that_makes_them(length, tied):
    prepare = heavy(tied=tied, length=length)
    model = trace_model(prepare)
    memory = predicted(model, micro_batches=1)
    assert 0 <= missing(memory, prepare) <= LOSS
    profile = model.profile(plan(model).setup)
    there = sum(profile.kind(kind).gradients for kind in (FIRST, *profile.blocks, LAST))
    if length == 1:
        assert memory.gradients == there - (0 if tied else 100 * 32 * 4)  # the embedding's comes last
    elif length == 32:
        assert memory.gradients == 0
    elif not tied:
        assert 0 < memory.gradients < there


def test_one_trace_serves_any_number_of_micro_batches():
    model, once = trace_model(heavy(micro_batches=2)), heavy()
    assert missing(predicted(model, micro_batches=1), once) == LOSS


def keeping(model, optimizer, batch):
    model(batch).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def letting_go_at_the_beginning(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch).backward()
    optimizer.step()


def letting_go_before_backward(model, optimizer, batch):
    loss = model(batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def beginning_with_another_loss(model, optimizer, batch):
    aside = model(batch)
    model.head.weight.pow(2).sum().backward()
    (aside.detach() + model(batch)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("step", "born"),
    [
        (keeping, False),
        (letting_go_at_the_beginning, True),
        (letting_go_before_backward, False),
        (beginning_with_another_loss, False),
    ],
)
def test_what_a_step_function_does_with_gradients_is_seen(step, born):
    prepare = heavy(step)
    model = trace_model(prepare)
    profile = model.profile(plan(model).setup)
    assert profile.kind("Block").cost(LayerPolicy()).born == born * profile.kind("Block").gradients
    short = missing(predicted(model, micro_batches=2 - born), prepare)
    assert short <= LOSS  # where it is not known since when gradients are there, they count for the whole step
    if step is not beginning_with_another_loss:
        assert short >= -2 * 16 * 100 * 4  # gradients that go before backward are not there with the logits' gradient


@pytest.mark.parametrize("name", ["llama", "tied ends"])
def test_one_micro_batch_recomputed_needs_what_the_dry_run_needs_too(name):
    model, prepare = traced(name, 1)
    memory = predicted(model, micro_batches=1, recompute=Recompute.FULL)
    every = frozenset(range(len(model.kinds)))
    assert missing(memory, lambda place: replace(prepare(place), recompute=every)) == 0


@pytest.mark.parametrize("name", MODELS)
def test_every_part_ends_forward_at_what_it_keeps_and_backward_at_nothing(name):
    model, _ = traced(name)
    profile = model.profile(plan(model).setup)
    ends = sum(profile.kind(kind).cost(LayerPolicy()).born for kind in (FIRST, LAST))  # a tied one is the end's
    assert ends == sum(profile.kind(kind).gradients for kind in (FIRST, LAST))
    for layer in profile.layers.values():
        assert layer.kind in {FIRST, LAST} or layer.cost(LayerPolicy()).born == layer.gradients
        for choice in layer.choices:
            cost = layer.cost(Policy.everywhere(choice, 1).for_layer(0))
            assert cost.kept >= 0
            assert cost.kept + cost.backward.net == 0
            assert cost.born == pytest.approx(layer.cost(LayerPolicy()).born, rel=1e-12)
            assert min(cost.forward_time, cost.backward_time) >= 0


CONFIGS = {
    "llama": LLAMA,
    "mixture of experts": QWEN_MOE,
    "two kinds in turn": GEMMA,
    "dense layers, then experts": DEEPSEEK,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_static_memory_and_kept_bytes_are_those_of_the_formula(name):
    model, _ = traced(name)
    # transformers has Gemma 2 without fused attention only
    setup = replace(plan(model).setup, attention="eager" if name == "two kinds in turn" else "sdpa")
    mine, formula = model.profile(setup), formula_profile(model_from_config(CONFIGS[name]), setup)
    plain = LayerPolicy()
    for kind, other in zip(mine.blocks, formula.blocks, strict=True):
        one, two = mine.kind(kind), formula.kind(other)
        assert one.count == two.count
        assert (one.parameters, one.gradients, one.optimizer) == (two.parameters, two.gradients, two.optimizer)
        assert abs(one.cost(plain).kept - two.cost(plain).kept) <= 32  # seeds of random numbers
        assert one.choices == two.choices


def test_full_recompute_keeps_the_input_and_select_what_is_left():
    model, _ = traced("llama")
    layer = model.profile(plan(model).setup).kind("LlamaDecoderLayer")
    none, select, full = (
        layer.cost(Policy.everywhere(choice, 1).for_layer(0))
        for choice in (Recompute.NONE, Recompute.SELECT, Recompute.FULL)
    )
    assert full.kept == 2 * SEQ * 64 * 2
    assert full.kept < select.kept < none.kept
    assert none.backward_time < select.backward_time < full.backward_time
    assert select.recompute_time < full.recompute_time <= full.forward_time


def test_a_shared_weight_is_held_at_both_ends_of_a_pipeline():
    model, _ = traced("tied ends")
    alone, piped = (model.profile(plan(model, pp=pp).setup).kind(LAST) for pp in (1, 2))
    assert piped.parameters - alone.parameters == 100 * 32 * 4
    assert piped.optimizer - alone.optimizer == 2 * 100 * 32 * 4
    assert any("both ends" in note for note in model.notes)
    both = model.profile(plan(model, pp=2).setup)
    assert [both.kind(kind).cost(LayerPolicy()).born for kind in (FIRST, LAST)] == [
        both.kind(kind).gradients for kind in (FIRST, LAST)
    ]


def test_a_pipeline_holds_what_its_stages_hold():
    model, _ = traced("llama")
    alone = simulate(model.profile(plan(model).setup), plan(model)).memory[0]
    asked = plan(model, pp=3)
    costs = chunk_costs(model.profile(asked.setup), asked)
    for line in ("parameters", "gradients", "optimizer"):
        assert getattr(costs, line).sum() == alone.lines[line]
    assert costs.born.sum() == alone.gradients
    assert model.boundary == 2 * SEQ * 64 * 2
    assert model.parameters == sum(p.numel() for p in MODELS["llama"]["model_or_builder"]().parameters())


def test_layers_that_checkpoint_themselves_leave_nothing_to_choose():
    def build():
        model = MODELS["llama"]["model_or_builder"]()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    model = trace_model(preparing(build, device="cuda", inputs=MODELS["llama"]["inputs"]))
    layer = model.profile(plan(model).setup).kind("LlamaDecoderLayer")
    assert layer.choices == (Recompute.NONE,)
    assert layer.cost(LayerPolicy()).kept == 2 * SEQ * 64 * 2
    assert any("checkpoints" in note for note in model.notes)


class Skipping(Language):
    """Layers that read what others made, as in a U-Net."""

    def forward(self, tokens):
        x = first = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
            x = x + first
        return x.sum()


def test_what_would_be_sent_besides_is_said():
    model = trace_model(preparing(lambda: Skipping(Block() for _ in range(8)), device="cuda", inputs=tokens))
    assert any("also have to send" in note for note in model.notes)


class Backwards(Language):
    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in reversed(self.blocks):
            x = block(x)
        return x.sum()


class Twice(Language):
    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return x.sum()


class Unused(Language):
    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks[:-1]:
            x = block(x)
        return x.sum()


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: nn.Linear(8, 8), "no repeated layers"),
        (lambda: Backwards(Block() for _ in range(4)), "in order|one after the other"),
        (lambda: Twice(Block() for _ in range(4)), "once each"),
        (lambda: Unused(Block() for _ in range(4)), "layer 3"),
    ],
)
def test_layers_that_cannot_be_dealt_are_refused(build, says):
    inputs = torch.empty(2, 8) if isinstance(build(), nn.Linear) else tokens
    with pytest.raises(EvenloadError, match=says):
        trace_model(preparing(build, device="cuda", inputs=inputs))


@pytest.mark.parametrize("change", [{"tp": 2}, {"dp": 2}, {"zero": 3, "dp": 2}, {"pp": 100}])
def test_a_setup_that_divides_layers_is_refused(change):
    model, _ = traced("llama")
    with pytest.raises(EvenloadError):
        model.profile(Setup(**{"micro_batches": 128, **change}))


def test_what_the_model_does_between_layers_makes_no_kinds():
    assert set(traced("convolutions")[0].kinds) == {"Sequential"}


def test_ends_have_names_of_their_own():
    model, _ = traced("llama")
    profile = model.profile(plan(model).setup)
    assert (profile.first, profile.last, profile.origin) == ((FIRST,), (LAST,), "traced")

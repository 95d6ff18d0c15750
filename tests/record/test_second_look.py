"""Who holds what is dead at the peak, looked up in the step after the one that told."""

import torch
from torch import nn

import evenload
from evenload.ledger.files import read_ledger
from evenload.ledger.growth import growth
from evenload.ledger.held import held_after_use
from evenload.units import MIB

torch.set_num_threads(1)


class Net(nn.Module):
    """Makes something large early, and its peak in backward."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(64, 4096)
        self.back = nn.Linear(4096, 64)
        self.last = None

    def forward(self, x, *, keep):
        statistics = self.embed(x).detach().square()
        if keep:
            self.last = statistics
        return self.back(torch.relu(self.embed(x)))


def train(*, steps=4, variable=False, keep=False, **options):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        x = torch.randn(512, 64)
        out = model(x, keep=keep)
        spread = (out.detach().unsqueeze(1) * torch.ones(512, 64, 64)) if variable else None
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return spread

    with evenload.record(model=model, stacks=True, **options) as recording:
        for _ in range(steps):
            result = step()
            del result
    return recording.ledger


def held(ledger, nbytes):
    return [one for one in held_after_use(ledger) if one.nbytes == nbytes]


def test_a_local_variable_that_holds_a_dead_tensor_through_backward_is_named():
    [one] = held(train(variable=True, owners=True), 8 * MIB)
    assert one.owner == "spread (variable of train.<locals>.step)"
    assert one.dead_since == "forward"


def test_an_attribute_of_a_module_that_holds_a_dead_tensor_is_named():
    [one] = held(train(keep=True, owners=True), 8 * MIB)
    assert ".last" in one.owner


def test_without_asking_nothing_is_looked_up_and_the_bytes_are_the_same():
    plain, looked = train(variable=True), train(variable=True, owners=True)
    assert plain.owners == ()
    assert plain.allocations.nbytes.tolist() == looked.allocations.nbytes.tolist()
    assert plain.allocations.freed.tolist() == looked.allocations.freed.tolist()


def test_nothing_that_was_looked_up_is_taken_for_a_leak():
    assert growth(train(variable=True, keep=True, owners=True, steps=8)) == ()


def test_too_few_steps_look_nothing_up():
    assert train(variable=True, owners=True, steps=2).owners == ()


def test_healthy_training_has_no_large_dead_memory():
    assert [one for one in held_after_use(train(owners=True)) if one.nbytes > 4 * MIB] == []


def test_holders_are_in_the_file(tmp_path):
    train(variable=True, owners=True, path=tmp_path / "run.ledger")
    [one] = held(read_ledger(tmp_path / "run.ledger"), 8 * MIB)
    assert one.owner == "spread (variable of train.<locals>.step)"


def test_looking_leaves_the_program_as_it_was():
    """No frame, no snapshot of variables, nothing that only the collector would free stays behind."""
    import gc

    kept = {}

    def step(record):
        inside = torch.ones(512, 512)
        kept["locals"] = locals()
        from evenload.record.owners import find_owners

        if record:
            find_owners([inside.untyped_storage()._cdata])
        return inside.untyped_storage()._cdata

    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            step(record=True)
            assert kept["locals"]["inside"].shape == (512, 512)
            import weakref

            gone = weakref.ref(kept["locals"]["inside"].untyped_storage())
            kept.clear()
            assert gone() is None
    finally:
        gc.enable()


def test_a_script_that_tells_its_steps_after_the_optimizer_has_no_step_too_many():
    """The first step would end twice: with its optimizer, and where the script says so."""
    model = torch.nn.Linear(64, 64)
    sgd = torch.optim.SGD(model.parameters(), 0.1)

    def train():
        out = model(torch.randn(64, 64))
        out.sum().backward()
        sgd.step()
        sgd.zero_grad()

    with evenload.record(owners=True) as recording:
        for _ in range(4):
            train()
            recording.step()
    ledger = recording.ledger
    begins = ledger.step_begins.tolist()
    assert ledger.steps == 4
    assert begins[2] - begins[1] == begins[3] - begins[2]  # nothing of the first step is left in the second
    assert any(owner.chain.startswith("out (variable of ") for owner in ledger.owners)

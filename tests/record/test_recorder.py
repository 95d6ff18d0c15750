"""What a recording says about every allocation: category, phase, module, micro-batch, line, step, life."""

import gc
import sys

import numpy as np
import pytest
import torch
from tests.record.training import Clamp, Stack, llama
from torch import nn

import evenload
from evenload.errors import EvenloadError
from evenload.ledger.curve import by_category, curve, live, peaks
from evenload.ledger.files import read_ledger
from evenload.ledger.ledger import ALIVE
from evenload.ledger.words import CATEGORIES, PHASES, Category, MarkKind, Phase


def where(ledger, *, category=None, phase=None, module=None, operator=None, mask=None):
    """Rows with the asked words."""
    rows = ledger.allocations
    keep = np.ones(len(rows), dtype=bool) if mask is None else mask
    if category is not None:
        keep = keep & (rows.category == category.code)
    if phase is not None:
        keep = keep & (rows.phase == phase.code)
    found = np.flatnonzero(keep).tolist()
    found = [row for row in found if module is None or ledger.module(row) == module]
    return [row for row in found if operator is None or ledger.operator(row) == operator]


def total(ledger, rows):
    return int(ledger.allocations.nbytes[rows].sum())


def storages(tensors):
    """Storages of tensors, each once, by identity."""
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}


def saved_storages(run):
    """Storages that autograd saves in `run`, parameters included, and what `run` returns."""
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return storages(saved), result


def record_step(model, run, **options):
    with evenload.record(model=model, **options) as recording:
        run().backward()
    return recording.ledger


# Categories


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_activations_are_the_saved_tensors_plus_the_outputs(attention):
    torch.manual_seed(0)
    model = llama(attn_implementation=attention)
    batch = torch.randint(0, 1024, (2, 32))
    outputs = []

    def run():
        result = model(input_ids=batch, labels=batch)
        outputs[:] = [result.loss, result.logits]
        return result.loss

    saved, _ = saved_storages(run)
    there_before = storages([*model.parameters(), *model.buffers(), batch])
    expected = {key: storage for key, storage in (saved | storages(outputs)).items() if key not in there_before}
    ledger = record_step(model, run)
    activations = ledger.allocations.nbytes[where(ledger, category=Category.ACTIVATION)].tolist()
    assert sorted(activations) == sorted(storage.nbytes() for storage in expected.values())


def test_a_tensor_hidden_in_a_context_is_an_activation_though_no_hook_sees_it():
    x = torch.randn(256, 256, requires_grad=True)
    saved, _ = saved_storages(lambda: Clamp.apply(x))
    assert 256 * 256 not in saved
    ledger = record_step(None, lambda: Clamp.apply(x).sum())
    (hidden,) = where(ledger, operator="aten.le.Scalar")
    assert CATEGORIES[ledger.allocations.category[hidden]] is Category.ACTIVATION
    assert ledger.allocations.nbytes[hidden] == 256 * 256


def test_categories_add_up_to_what_the_model_and_the_optimizer_hold():
    torch.manual_seed(0)
    model = Stack()
    adamw = torch.optim.AdamW(model.parameters())
    with evenload.record() as recording:  # nothing is told: parameters are found when the model is called
        for _ in range(2):
            model(torch.randn(8, 32)).sum().backward()
            adamw.step()
    ledger = recording.ledger
    sums = by_category(ledger, live(ledger, ledger.end))
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    states = sum(value.nbytes for state in adamw.state.values() for value in state.values())
    assert sums[Category.PARAMETER] == parameters
    assert sums[Category.GRADIENT] == parameters
    assert sums[Category.OPTIMIZER] == states
    assert sums[Category.ACTIVATION] == 0


def test_parameters_and_states_from_before_are_counted_from_the_start():
    model = Stack()
    adamw = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 32)).sum().backward()
    adamw.step()
    with evenload.record(model=model, optimizer=adamw) as recording:
        pass
    sums = by_category(recording.ledger, live(recording.ledger, 0))
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    assert (sums[Category.PARAMETER], sums[Category.GRADIENT]) == (parameters, parameters)
    assert sums[Category.OPTIMIZER] >= 2 * parameters


def test_a_model_that_is_built_inside_has_parameters_even_if_it_never_runs():
    with evenload.record() as recording:
        model = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10))
    ledger = recording.ledger
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert total(ledger, where(ledger, category=Category.PARAMETER)) == held


def test_main_copies_that_only_the_optimizer_knows_are_optimizer_state():
    model = nn.Linear(16, 16, bias=False).to(torch.bfloat16)
    main = [parameter.detach().float() for parameter in model.parameters()]
    sgd = torch.optim.SGD(main, lr=0.1)
    with evenload.record(model=model, optimizer=sgd) as recording:
        pass
    ledger = recording.ledger
    assert total(ledger, where(ledger, category=Category.OPTIMIZER)) == 16 * 16 * 4
    assert total(ledger, where(ledger, category=Category.PARAMETER)) == 16 * 16 * 2


def test_what_is_made_outside_and_read_by_forward_is_input():
    model = Stack()
    with evenload.record(model=model) as recording:
        batch, labels, unused = torch.randn(8, 32), torch.zeros(8, 8), torch.ones(77)
        nn.functional.mse_loss(model(batch), labels).backward()
    ledger = recording.ledger
    assert total(ledger, where(ledger, category=Category.INPUT)) == batch.nbytes + labels.nbytes
    assert unused.nbytes in ledger.allocations.nbytes[where(ledger, category=Category.TEMPORARY)]


def test_numpy_memory_is_the_hosts_and_not_in_the_curve():
    array = np.ones((64, 32), dtype=np.float32)
    model = Stack()
    with evenload.record(model=model) as recording:
        model(torch.from_numpy(array)).sum().backward()
    ledger = recording.ledger
    (foreign,) = [
        row for row in range(len(ledger.allocations)) if ledger.devices[ledger.allocations.device[row]] == "foreign"
    ]
    assert ledger.allocations.nbytes[foreign] == array.nbytes
    assert not ledger.on_device[foreign]
    assert ledger.device == "cpu"


# Phases, modules, micro-batches


def test_every_phase_is_told_and_the_loss_outside_modules_is_forward():
    model = Stack()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with evenload.record(model=model) as recording:
        loss = nn.functional.mse_loss(model(torch.randn(8, 32)), torch.zeros(8, 8))
        loss.backward()
        sgd.step()
        torch.ones(3)
    ledger = recording.ledger
    (loss_row,) = where(ledger, operator="aten.mse_loss")
    assert PHASES[ledger.allocations.phase[loss_row]] is Phase.FORWARD
    assert PHASES[ledger.allocations.phase[where(ledger, operator="aten.ones_like")[0]]] is Phase.BACKWARD
    assert {PHASES[code] for code in ledger.allocations.phase[where(ledger, category=Category.OPTIMIZER)]} == {
        Phase.OPTIMIZER
    }
    assert PHASES[ledger.allocations.phase[where(ledger, operator="aten.ones")[-1]]] is Phase.OTHER
    marks = [PHASES[mark.value] for mark in ledger.marks if mark.kind is MarkKind.PHASE]
    assert marks == [Phase.FORWARD, Phase.BACKWARD, Phase.OTHER, Phase.OPTIMIZER, Phase.OTHER]


@pytest.mark.parametrize("nested", [False, True])
def test_recomputation_is_a_phase_of_its_own_with_the_same_modules(nested):
    torch.manual_seed(0)
    model = Stack(nested=True) if nested else llama(checkpointing=True)
    with evenload.record(model=model) as recording:
        if nested:
            model(torch.randn(8, 32)).sum().backward()
        else:
            model(input_ids=torch.zeros(2, 8, dtype=torch.long)).logits.sum().backward()
    ledger = recording.ledger
    again = where(ledger, phase=Phase.RECOMPUTE)
    modules = {ledger.module(row) for row in again}
    name = "blocks.{}.up" if nested else "model.layers.{}.mlp.up_proj"
    assert {name.format(layer) for layer in range(3 if nested else 2)} <= modules
    assert ledger.operator(again[0]) is not None
    assert where(ledger, phase=Phase.RECOMPUTE, category=Category.ACTIVATION)


def test_backward_that_records_a_graph_is_not_recomputation():
    x = torch.randn(32, 32, requires_grad=True)
    with evenload.record() as recording:
        (gradient,) = torch.autograd.grad((x @ x).relu().sum(), x, create_graph=True)
        (gradient**2).sum().backward()
    ledger = recording.ledger
    assert where(ledger, phase=Phase.RECOMPUTE) == []
    kept = where(ledger, phase=Phase.BACKWARD, category=Category.ACTIVATION)
    assert 32 * 32 * 4 in ledger.allocations.nbytes[kept]


def test_recomputation_inside_a_backward_that_records_a_graph_is_told():
    model = Stack(nested=True)
    with evenload.record(model=model) as recording:
        x = torch.randn(8, 32, requires_grad=True)
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert where(recording.ledger, phase=Phase.RECOMPUTE)


def test_backward_knows_the_module_whose_operator_it_undoes():
    torch.manual_seed(0)
    model = llama()
    batch = torch.randint(0, 1024, (2, 16))
    ledger = record_step(model, lambda: model(input_ids=batch, labels=batch).loss)
    for name, parameter in model.named_parameters():
        owner = name.removesuffix(".weight")
        rows = where(ledger, category=Category.GRADIENT, module=owner)
        assert total(ledger, rows) == parameter.nbytes, name
    silu = where(ledger, phase=Phase.BACKWARD, operator="aten.silu_backward")
    assert [ledger.module(row) for row in silu] == ["model.layers.1.mlp.act_fn", "model.layers.0.mlp.act_fn"]
    unknown = [row for row in where(ledger, phase=Phase.BACKWARD) if ledger.module(row) is None]
    assert {ledger.operator(row) for row in unknown} <= {"aten.ones_like", "aten.nll_loss_backward"}


@pytest.mark.parametrize("checkpointing", [True, "reentrant"])
def test_backward_of_a_checkpointed_model_knows_its_modules(checkpointing):
    torch.manual_seed(0)
    model = llama(checkpointing=checkpointing)
    batch = torch.randint(0, 1024, (2, 16))
    ledger = record_step(model, lambda: model(input_ids=batch, labels=batch).loss)
    for name, parameter in model.named_parameters():
        rows = where(ledger, category=Category.GRADIENT, module=name.removesuffix(".weight"))
        assert total(ledger, rows) == parameter.nbytes, name
    silu = where(ledger, phase=Phase.BACKWARD, operator="aten.silu_backward")
    assert [ledger.module(row) for row in silu] == ["model.layers.1.mlp.act_fn", "model.layers.0.mlp.act_fn"]


def test_a_backward_that_does_not_go_through_torch_autograd_is_told_all_the_same():
    from torch.autograd.graph import _engine_run_backward

    model = Stack(layers=1)
    with evenload.record(model=model) as recording:
        loss = model(torch.randn(8, 32)).sum()
        _engine_run_backward((loss,), (torch.ones(()),), False, False, (), True, True)
        torch.ones(5)
    ledger = recording.ledger
    assert total(ledger, where(ledger, category=Category.GRADIENT)) == sum(p.nbytes for p in model.parameters())
    assert PHASES[ledger.allocations.phase[where(ledger, operator="aten.ones")[-1]]] is Phase.OTHER


def test_backward_after_two_forwards_keeps_their_modules_apart():
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = nn.ModuleDict({"first": first, "second": second})
    with evenload.record(model=model) as recording:
        left, right = first(torch.randn(2, 4)), second(torch.randn(2, 4))
        left.sum().backward()
        right.sum().backward()
    ledger = recording.ledger
    (relu,) = where(ledger, operator="aten.threshold_backward")
    assert ledger.module(relu) == "second.1"
    gradients = [ledger.module(row) for row in where(ledger, category=Category.GRADIENT)]
    assert gradients == ["first", "first", "second.0", "second.0"]


def test_micro_batches_are_counted_by_backwards_and_start_again_with_every_step():
    model = Stack()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with evenload.record(model=model) as recording:
        for _ in range(2):
            for _ in range(3):
                model(torch.randn(8, 32)).sum().backward()
            sgd.step()
            sgd.zero_grad()
    ledger = recording.ledger
    rows = where(ledger, operator="aten.native_layer_norm", module="blocks.0.norm")[::3]
    assert ledger.allocations.micro_batch[rows].tolist() == [0, 1, 2, 0, 1, 2]
    assert ledger.step_of(ledger.allocations.allocated[rows]).tolist() == [0, 0, 0, 1, 1, 1]
    back = where(ledger, operator="aten.masked_fill.Scalar", module="blocks.0")
    assert ledger.allocations.micro_batch[back].tolist() == [0, 1, 2, 0, 1, 2]


def test_a_runtime_may_say_which_micro_batch_it_works_on():
    model = Stack()
    with evenload.record(model=model) as recording:
        outputs = []
        for number in range(3):  # as a pipeline does: forwards first, backwards later, in another order
            with recording.micro_batch(number):
                outputs.append(model(torch.randn(8, 32)).sum())
        for output in reversed(outputs):
            output.backward()
    ledger = recording.ledger
    back = where(ledger, operator="aten.masked_fill.Scalar", module="blocks.0")
    assert ledger.allocations.micro_batch[back].tolist() == [2, 1, 0]


def test_a_loss_module_does_not_take_the_name_of_the_model():
    model, loss = Stack(), nn.MSELoss()
    with evenload.record() as recording:
        loss(model(torch.randn(8, 32)), torch.zeros(8, 8)).backward()
    ledger = recording.ledger
    (row,) = where(ledger, operator="aten.mse_loss")
    assert ledger.module(row) == "MSELoss"
    assert where(ledger, module="blocks.0.up", category=Category.GRADIENT)


def test_compiled_and_checkpointed_wrappers_leave_no_trace_in_paths():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), nn.Linear(4, 4))
    with evenload.record() as recording:
        torch.compile(model)(torch.randn(2, 4)).sum().backward()
    ledger = recording.ledger
    modules = {ledger.module(row) for row in where(ledger, category=Category.GRADIENT)}
    assert modules == {"0.0", "1"}


# Lives


def test_last_use_and_free_bound_the_life_of_a_tensor():
    with evenload.record() as recording:
        kept = torch.ones(1000)
        used = kept + 1
        del used
        torch.ones(10)
    rows = recording.ledger.allocations
    assert rows.freed[0] == ALIVE
    assert rows.last_used[0] > rows.allocated[1]
    assert rows.freed[1] > rows.last_used[1] >= rows.allocated[1]
    assert rows.last_used[1] < rows.allocated[2]


def test_dead_memory_that_is_held_shows_between_needed_and_held_peak():
    with evenload.record() as recording:
        dead = torch.ones(1000) + 1
        torch.ones(1000).mul_(2)
    found = peaks(recording.ledger)
    assert found.held == 8000
    assert found.needed == 8000  # the ones and their sum were needed together
    with evenload.record() as recording:
        dead = torch.ones(500)
        big = torch.ones(1000)
        del big
        torch.ones(1000)
    found = peaks(recording.ledger)
    assert (found.needed, found.held) == (4000, 6000)
    assert dead.numel() == 500


def test_views_and_in_place_operators_make_no_memory():
    with evenload.record() as recording:
        base = torch.ones(100, 100)
        base[3].view(10, 10).t().add_(1).mul_(2)
        base.unsqueeze(0).expand(5, 100, 100)
    assert len(recording.ledger.allocations) == 1


def test_a_view_that_keeps_a_large_base_alive_is_shown():
    with evenload.record() as recording:
        corner = torch.ones(1000, 1000)[:2, :3]
        whole = torch.ones(50)
        halves = torch.ones(60).chunk(2)
    rows = recording.ledger.allocations
    assert rows.nbytes.tolist() == [4_000_000, 200, 240]
    assert rows.reach.tolist() == [corner.nbytes, -1, -1]
    assert whole.numel() + halves[0].numel() == 80


def test_an_activation_of_which_backward_reads_a_part_is_shown():
    class Part(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            doubled = x * 2
            ctx.save_for_backward(doubled[:, 0])
            return doubled.sum(1)

        @staticmethod
        def backward(ctx, gradient):
            return (gradient * ctx.saved_tensors[0])[:, None].expand(-1, 64)

    x = torch.randn(32, 64, requires_grad=True)
    ledger = record_step(None, lambda: Part.apply(x).sum())
    (row,) = where(ledger, operator="aten.mul.Tensor", phase=Phase.FORWARD)
    assert (ledger.allocations.nbytes[row], ledger.allocations.reach[row]) == (32 * 64 * 4, 32 * 4)


def test_a_resized_storage_is_followed():
    with evenload.record() as recording:
        tensor = torch.ones(1000)
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(4000)
        tensor.untyped_storage().resize_(400)
    ledger = recording.ledger
    assert ledger.allocations.nbytes.tolist() == [4000, 4000, 400]
    assert ledger.allocations.previous.tolist() == [-1, 0, 1]
    assert curve(ledger).level.tolist() == [4000, 0, 4000, 4400, 400]


def test_memory_freed_by_the_garbage_collector_is_freed_there():
    class Holder:
        pass

    gc.collect()
    with evenload.record() as recording:
        holder = Holder()
        holder.self, holder.tensor = holder, torch.ones(1000)
        del holder
        before = torch.ones(1)
        gc.collect()
        after = torch.ones(1)
    rows = recording.ledger.allocations
    assert rows.allocated[1] < rows.freed[0] < rows.allocated[2]
    assert before.numel() + after.numel() == 2


def test_a_recording_does_not_keep_tensors_alive():
    import weakref

    model = Stack()
    with evenload.record(model=model):
        loss = model(torch.randn(8, 32)).sum()
        node = weakref.ref(loss.untyped_storage())
        loss.backward()
        del loss
        assert node() is None
    parameter = weakref.ref(model.head.weight)
    del model
    gc.collect()
    assert parameter() is None


# Lines


def test_stacks_name_the_line_of_the_model_in_forward_and_in_backward():
    model = Stack(layers=1)
    ledger = record_step(model, lambda: model(torch.randn(8, 32)).sum(), stacks=True)
    (norm,) = where(ledger, operator="aten.native_layer_norm")[:1]
    assert ledger.source(norm).startswith(__file__.replace("test_recorder", "training"))
    assert ledger.source(norm).endswith("Block.forward")
    assert any("test_recorder.py" in line for line in ledger.stack(norm))
    undone = where(ledger, operator="aten.native_layer_norm_backward")[0]
    assert ledger.source(undone) == ledger.source(norm)
    (hand,) = where(ledger, operator="aten.masked_fill.Scalar")
    assert ledger.source(hand).endswith("Clamp.backward")
    assert not any("site-packages/torch/" in line or "evenload/record" in line for line in ledger.stack(norm))


def test_without_stacks_there_are_no_lines():
    model = Stack(layers=1)
    ledger = record_step(model, lambda: model(torch.randn(8, 32)).sum())
    assert ledger.frames == ()
    assert ledger.source(0) is None
    assert not ledger.metadata.stacks


# Steps and the host


def test_a_host_line_stands_at_the_end_of_every_step():
    model = Stack()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with evenload.record(model=model) as recording:
        for _ in range(3):
            model(torch.randn(8, 32)).sum().backward()
            sgd.step()
            sgd.zero_grad()
    ledger = recording.ledger
    assert [line.step for line in ledger.host] == [0, 1, 2, 3]
    if sys.platform == "linux":
        assert all(line.resident > 50e6 for line in ledger.host)
    assert all(line.pinned == 0 for line in ledger.host)
    steps = [mark.value for mark in ledger.marks if mark.kind is MarkKind.STEP]
    assert steps == [0, 1, 2, 3]


def test_two_optimizers_make_one_step():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    with evenload.record() as recording:
        for _ in range(2):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
    assert len(recording.ledger.step_begins) == 3


def test_a_script_may_say_where_its_steps_end():
    model = Stack()
    with evenload.record(model=model) as recording:
        for _ in range(2):
            with torch.no_grad():
                model(torch.randn(8, 32))
            recording.step()
    assert len(recording.ledger.step_begins) == 3


def test_an_optimizer_that_steps_inside_backward_ends_the_step_at_the_next_forward():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for parameter in model.parameters():
        sgd = torch.optim.SGD([parameter], lr=0.1)

        def hook(parameter, sgd=sgd):
            sgd.step()
            sgd.zero_grad()

        parameter.register_post_accumulate_grad_hook(hook)
    with evenload.record(model=model) as recording:
        for _ in range(3):
            model(torch.randn(2, 4)).sum().backward()
    ledger = recording.ledger
    assert len(ledger.step_begins) == 3
    gradients = where(ledger, category=Category.GRADIENT)
    assert len(gradients) == 12
    assert (ledger.allocations.freed[gradients] != ALIVE).all()


# Leaving no trace


def test_everything_is_as_before_when_a_recording_ends():
    before = (torch.autograd.backward, torch.autograd.grad, torch.get_rng_state, torch.UntypedStorage.resize_)
    own = "resize_" in vars(torch.UntypedStorage)
    with pytest.raises(ZeroDivisionError), evenload.record():
        1 / 0  # noqa: B018
    after = (torch.autograd.backward, torch.autograd.grad, torch.get_rng_state, torch.UntypedStorage.resize_)
    assert before == after
    assert ("resize_" in vars(torch.UntypedStorage)) == own
    from torch.nn.modules import module

    assert not module._global_forward_hooks
    assert not module._global_forward_pre_hooks


def test_gradients_are_bit_identical_with_and_without_a_recording():
    def gradients(record):
        torch.manual_seed(0)
        model = llama(checkpointing=True, attention_dropout=0.1)
        batch = torch.randint(0, 1024, (2, 16))
        if record:
            with evenload.record(model=model, stacks=True):
                model(input_ids=batch, labels=batch).loss.backward()
        else:
            model(input_ids=batch, labels=batch).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    for plain, recorded in zip(gradients(record=False), gradients(record=True), strict=True):
        assert torch.equal(plain, recorded)


def test_an_error_inside_leaves_the_ledger_up_to_there(tmp_path):
    path = tmp_path / "run.ledger"

    def run():
        with evenload.record(path=path):
            torch.ones(10)
            raise RuntimeError("no luck")

    with pytest.raises(RuntimeError, match="no luck"):
        run()
    ledger = read_ledger(path)
    assert ledger.complete
    assert [mark.text for mark in ledger.marks if mark.kind is MarkKind.NOTE] == ["ended by RuntimeError: no luck"]
    assert ledger.allocations.nbytes.tolist() == [40]


def test_an_allocation_that_fails_is_marked_with_what_it_asked_for():
    with evenload.record() as recording, pytest.raises(RuntimeError):
        torch.empty(2**60)
    (mark,) = [mark for mark in recording.ledger.marks if mark.kind is MarkKind.FAILED]
    assert mark.value == 2**62
    assert mark.text.startswith("aten.empty")


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"model": 3}, "model is a int, not a torch"),
        ({"optimizer": "adam"}, "optimizer is a str, not a torch"),
        ({"stacks": 1}, "stacks is 1, not True or False"),
        ({"synchronize": "yes"}, "synchronize is 'yes', not True or False"),
    ],
)
def test_wrong_arguments_are_named(options, fact):
    with pytest.raises(EvenloadError, match=fact):
        evenload.record(**options)


def test_a_recording_is_used_once_and_asked_after_it_began():
    recording = evenload.record()
    with pytest.raises(EvenloadError, match="nothing has been recorded yet"):
        _ = recording.ledger
    with recording, pytest.raises(EvenloadError, match="not the number of a micro-batch"), recording.micro_batch(-1):
        pass
    with pytest.raises(EvenloadError, match="has been used"), recording:
        pass

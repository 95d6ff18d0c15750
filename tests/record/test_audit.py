"""Custom autograd functions: what they keep, and what their backward really reads."""

import torch
from torch.autograd import Function

from evenload.record.audit import audit_functions


class SavesTooMuch(Function):
    @staticmethod
    def forward(ctx, x, w):
        y = (x * w).exp()
        ctx.save_for_backward(x, w, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, w, y = ctx.saved_tensors
        assert x.shape == y.shape  # a shape is no data
        return grad * y * w.view(-1), None


class Hides(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        ctx.output = y
        ctx.tables = {"a": [x * 2]}
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.tables["a"][0]


class KeepsNothing(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def x():
    return torch.ones(1024, requires_grad=True)


def test_what_backward_does_not_read_is_told_from_what_it_reads():
    with audit_functions() as audit:
        SavesTooMuch.apply(x(), torch.ones(1024)).sum().backward()
    [function] = audit.functions
    assert (function.name, function.calls, function.nbytes) == ("SavesTooMuch", 1, 3 * 4096)
    assert [(kept.name, kept.is_input, kept.is_output, kept.read) for kept in function.kept] == [
        ("saved_tensors[0]", True, False, False),
        ("saved_tensors[1]", True, False, True),
        ("saved_tensors[2]", False, True, True),
    ]
    assert function.unread == 4096
    assert function.source.startswith(f"{__file__}:")


def test_attributes_of_the_context_are_found_in_containers_too():
    with audit_functions() as audit:
        Hides.apply(x()).sum().backward()
    [function] = audit.functions
    assert [(kept.name, kept.how, kept.is_output, kept.read) for kept in function.kept] == [
        ("ctx.output", "attribute", True, False),
        ("ctx.tables", "attribute", False, True),
    ]
    said = str(audit)
    assert "ctx.output is hidden from PyTorch" in said
    assert "makes a cycle that only the garbage collector frees" in said
    assert "4.00 KiB a call are kept and never read: do not save ctx.output" in said


def test_a_function_that_keeps_nothing_is_counted_and_left_alone():
    with audit_functions() as audit:
        for _ in range(3):
            KeepsNothing.apply(x()).sum().backward()
    [function] = audit.functions
    assert (function.calls, function.kept, function.unread) == (3, (), 0)


def test_without_backward_reading_is_not_judged():
    with audit_functions() as audit:
        SavesTooMuch.apply(x(), torch.ones(1024))
    assert {kept.read for kept in audit.functions[0].kept} == {None}
    assert audit.functions[0].unread == 0
    assert "backward has not run" in str(audit)


def test_one_call_that_reads_is_enough():
    class Sometimes(Function):
        @staticmethod
        def forward(ctx, x, use):
            ctx.save_for_backward(x)
            ctx.use = use
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0] if ctx.use else grad * 2, None

    with audit_functions() as audit:
        for use in (False, True, False):
            Sometimes.apply(x(), use).sum().backward()
    assert audit.functions[0].unread == 0


def test_several_functions_nested_in_one_graph_are_kept_apart():
    with audit_functions() as audit:
        KeepsNothing.apply(SavesTooMuch.apply(Hides.apply(x()), torch.ones(1024))).sum().backward()
    assert {function.name: function.unread for function in audit.functions} == {
        "SavesTooMuch": 4096,
        "Hides": 4096,
        "KeepsNothing": 0,
    }


def test_gradients_are_the_same_and_nothing_is_left_behind():
    def gradient():
        given = x()
        SavesTooMuch.apply(given, torch.full((1024,), 0.5)).sum().backward()
        return given.grad

    plain, before = gradient(), Function.__dict__["apply"]
    with audit_functions():
        audited = gradient()
    assert torch.equal(plain, audited)
    assert Function.__dict__["apply"] is before
    assert torch.equal(gradient(), plain)


def test_functions_without_gradient_are_no_matter():
    with audit_functions() as audit, torch.no_grad():
        SavesTooMuch.apply(x(), torch.ones(1024))
    assert audit.functions == ()
    assert str(audit) == "no custom function ran"

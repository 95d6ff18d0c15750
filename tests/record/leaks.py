"""Programs that leak and programs that do not: each is called once a step."""

import contextlib
import functools
import weakref
from collections import deque

import torch
from torch import nn

HISTORY = []
ERRORS = []


class Keeps(torch.autograd.Function):
    """Keeps its output in an attribute of its context."""

    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        ctx.kept = y
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad


class Saves(torch.autograd.Function):
    """Keeps its output as PyTorch wants it."""

    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class KeepsInput(torch.autograd.Function):
    """Keeps its input in an attribute of its context: not nice, and no leak."""

    @staticmethod
    def forward(ctx, x):
        ctx.given = x
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Holder:
    """Holds a tensor and itself."""

    def __init__(self):
        self.tensor = torch.ones(512, 512)
        self.me = self


class WeakHolder:
    """Holds a tensor, and itself weakly."""

    def __init__(self):
        self.tensor = torch.ones(512, 512)
        self.me = weakref.ref(self)


class WithLambda(nn.Module):
    """A module whose attribute is a function that refers to the module."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(512, 512, bias=False)
        self.f = lambda: self.layer


class Plain(nn.Module):
    """The same without the function."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(512, 512, bias=False)

    def f(self):
        return self.layer


class Trainer:
    """Keeps what it should not, or what it may."""

    def __init__(self):
        self.outputs = []
        self.recent = deque(maxlen=50)

    def keep(self):
        self.outputs.append(torch.ones(512, 512))

    def keep_recent(self):
        self.recent.append(torch.ones(512, 512))


def keeps_output(step):
    Keeps.apply(torch.ones(512, 512, requires_grad=True))


def keeps_output_with_backward(step):
    Keeps.apply(torch.ones(512, 512, requires_grad=True)).sum().backward()


def saves_output(step):
    Saves.apply(torch.ones(512, 512, requires_grad=True)).sum().backward()


def keeps_input(step):
    KeepsInput.apply(torch.ones(512, 512, requires_grad=True)).sum().backward()


def holds_itself(step):
    Holder()


def holds_itself_weakly(step):
    WeakHolder()


def module_with_lambda(step):
    WithLambda()


def module_without_lambda(step):
    Plain()


def fail(tensor):
    raise ValueError(tensor.shape)


def keeps_exception_in_itself(step):
    tensor = torch.ones(512, 512)
    try:
        fail(tensor)
    except ValueError as error:
        kept = error
    return kept is None


def handles_exception(step):
    tensor = torch.ones(512, 512)
    with contextlib.suppress(ValueError):
        fail(tensor)


def appends_to_global(step):
    HISTORY.append({"loss": torch.ones(512, 512)})


def stores_exception(step):
    tensor = torch.ones(512, 512)
    try:
        fail(tensor)
    except ValueError as error:
        ERRORS.append(error)


def stores_text_of_exception(step):
    tensor = torch.ones(512, 512)
    try:
        fail(tensor)
    except ValueError as error:
        ERRORS.append(str(error))


def identity_hooks(step):
    x = torch.ones(512, 512, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        (x * 2).exp()


def detaching_hooks(step):
    x = torch.ones(512, 512, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):
        (x * 2).exp()


def graph_of_gradients(step):
    w = torch.ones(512, 512, requires_grad=True)
    (w**3).sum().backward(create_graph=True)


def gradients_by_grad(step):
    w = torch.ones(512, 512, requires_grad=True)
    torch.autograd.grad((w**3).sum(), w, create_graph=True)


@functools.cache
def unbounded(step):
    return torch.ones(512, 512)


@functools.lru_cache(maxsize=100)
def bounded(step):
    return torch.ones(512, 512)

"""Puts the operator choices of a target in place, for as long as a dry run lasts."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from evenload.record._torch_private import (
    CONVERT,
    TRUNCATED,
    FakeTensor,
    foreach_tables,
    grouped_shapes,
    take_away,
)
from evenload.record.attention import attention
from evenload.record.autocast import install
from evenload.record.recurrent import NETWORKS, recurrent
from evenload.record.targets import Target


@contextmanager
def substituted(target: Target, *, fake: bool) -> Generator[None]:
    """Run the operators of a target inside the block, on fake or on meta tensors; see `evenload.record.targets`."""
    with ExitStack() as stack:
        _grouped_products(stack)
        if fake:
            _conversions(stack)
            _initial_values(stack)
            _copies(stack)
        if target.accelerator:
            _fused_attention(stack)
            _foreach(stack)
            if fake:  # what is on meta has no autocast nor such layers, and is there to stay
                _recurrent_layers(stack)
                _autocast(stack, target)
                _moves(stack, target)
        yield


@contextmanager
def substituted_in_libraries(target: Target) -> Generator[None]:
    """The same for functions of modules that the user's code may have imported only while it built the model."""
    with ExitStack() as stack:
        _masks(stack)
        if target.accelerator:
            _flex_attention(stack)
        yield


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _fused_attention(stack: ExitStack) -> None:
    operator = torch.ops.aten.scaled_dot_product_attention.default

    def chosen(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if query.device.type == "meta" or isinstance(query, FakeTensor):
            return attention(query, *args, **kwargs)
        return operator.decompose(query, *args, **kwargs)  # a real tensor, which is nobody's dry run

    library: Any = torch.library.Library("aten", "IMPL")
    stack.callback(take_away, library)
    for key in ("AutogradMeta", "AutogradCPU"):
        library.impl("scaled_dot_product_attention", chosen, key)


def _recurrent_layers(stack: ExitStack) -> None:
    library: Any = torch.library.Library("aten", "IMPL")
    stack.callback(take_away, library)
    for name in NETWORKS:
        operator, fused = getattr(torch.ops.aten, name).input, recurrent(name)
        library.impl(f"{name}.input", partial(_where_fake, fused, operator.decompose), "AutogradCPU")


def _where_fake(on_fake: Any, really: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call one function for fake tensors, and another for real ones, which are nobody's dry run."""
    return (on_fake if isinstance(tensor, FakeTensor) else really)(tensor, *args, **kwargs)


def _flex_attention(stack: ExitStack) -> None:
    module = sys.modules.get("torch.nn.attention.flex_attention")
    if module is None:
        return

    def flex_attention(  # noqa: PLR0917  # the signature of the function
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        score_mod: Any = None,  # noqa: ARG001  # of no memory
        block_mask: Any = None,  # noqa: ARG001
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        **_options: Any,
    ) -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=enable_gqa)
        return (out, query.new_empty(query.shape[:-1], dtype=torch.float32)) if return_lse else out

    _replace(stack, module, "flex_attention", flex_attention)


def _foreach(stack: ExitStack) -> None:
    """Let optimizers choose as they do on an accelerator."""
    owners, name, types = foreach_tables()

    def with_stand_ins(original: Any) -> Any:
        @wraps(original)
        def devices() -> list[str]:
            return [*original(), "cpu", "meta"]

        return devices

    for owner in owners:
        _replace(stack, owner, name, with_stand_ins(getattr(owner, name)))
    for known in types:
        if FakeTensor not in known:
            known.append(FakeTensor)
            stack.callback(known.remove, FakeTensor)


def _autocast(stack: ExitStack, target: Target) -> None:
    """Let `torch.autocast` of the target act on fake CPU tensors."""
    original = torch.amp.autocast_mode.autocast.__init__

    @wraps(original)
    def of_target(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == target.kind:
            dtype = torch.get_autocast_dtype(device_type) if dtype is None else dtype
            device_type = "cpu"
        original(self, device_type, dtype, *args, **kwargs)

    _replace(stack, torch.amp.autocast_mode.autocast, "__init__", of_target)
    library: Any = torch.library.Library("aten", "IMPL")
    stack.callback(take_away, library)
    install(library)


def _moves(stack: ExitStack, target: Target) -> None:
    """Let tensors be moved to the target, and programs wait for it: all of them stand for tensors there."""
    here = torch.device("cpu")
    plain = torch.Tensor.to

    def at_home(place: Any) -> Any:
        if isinstance(place, (torch.device, str)):
            return here if torch.device(place).type == target.kind else place
        return here if type(place) is int else place

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and not isinstance(args[0], (torch.Tensor, torch.dtype)):
            args = (at_home(args[0]), *args[1:])
        elif "device" in kwargs:
            kwargs = {**kwargs, "device": at_home(kwargs["device"])}
        return plain(self, *args, **kwargs)

    def stay(self: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return self

    for name, method in (("to", to), ("pin_memory", stay), (target.kind, stay)):
        if hasattr(torch.Tensor, name):
            setattr(torch.Tensor, name, method)
            stack.callback(delattr, torch.Tensor, name)
    module = getattr(torch, target.kind, None)
    for name in ("synchronize", "set_device"):
        if hasattr(module, name):
            _replace(stack, module, name, _nothing)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Does nothing: there is no device to wait for."""


def _conversions(stack: ExitStack) -> None:
    """Let modules of fake tensors be converted: PyTorch would exchange the tensors, which weak references forbid."""
    original: Any = getattr(nn.Module, CONVERT)

    @wraps(original)
    def apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:  # its signature
        own = [parameter for parameter in self.parameters(recurse=False) if type(parameter) is FakeTensor]
        if not own:
            return original(self, fn, recurse)
        for child in self.children() if recurse else ():
            getattr(child, CONVERT)(fn)
        with torch.no_grad():
            for parameter in own:
                parameter.data = fn(parameter)
                if parameter.grad is not None:
                    parameter.grad.data = fn(parameter.grad)
            for name, buffer in self.named_buffers(recurse=False):
                setattr(self, name, fn(buffer))
        return self

    _replace(stack, nn.Module, CONVERT, apply)


def _copies(stack: ExitStack) -> None:
    """Let modules be copied as a model is built: copies of fake tensors have two storages, which would count twice."""

    def copied(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) in memo:
            return memo[id(self)]
        values = self.detach().clone()
        made = nn.Parameter(values, self.requires_grad) if isinstance(self, nn.Parameter) else values
        made.requires_grad_(self.requires_grad)
        memo[id(self)] = made
        if self.grad is not None:
            made.grad = deepcopy(self.grad, memo)
        for name, value in vars(self).items():
            if name not in vars(made):
                setattr(made, name, deepcopy(value, memo))
        return made

    kind: Any = FakeTensor
    kind.__deepcopy__ = copied
    stack.callback(delattr, kind, "__deepcopy__")


def _initial_values(stack: ExitStack) -> None:
    """Let parameters be initialized by a distribution that is cut off: PyTorch draws again while one is outside."""
    original: Any = getattr(nn.init, TRUNCATED)

    @wraps(original)
    def drawn(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else original(tensor, *args, **kwargs)

    _replace(stack, nn.init, TRUNCATED, drawn)


def _grouped_products(stack: ExitStack) -> None:
    """Let experts multiply in any type: PyTorch knows the shapes for bfloat16 alone, and has kernels for the others."""
    module, name, shaped = grouped_shapes()
    original = getattr(module, name)

    @wraps(original)
    def product(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        scaled = any(value is not None for value in (*args[:2], kwargs.get("scale_a"), kwargs.get("scale_b")))
        if scaled or a.dtype == torch.bfloat16 or a.dtype != b.dtype or not a.is_floating_point():
            return original(a, b, *args, **kwargs)
        return shaped(a, b, kwargs.get("offs"), kwargs.get("out_dtype"))

    _replace(stack, module, name, product)


def _masks(stack: ExitStack) -> None:
    """A batch that is neither packed nor padded: what transformers finds by looking at positions and masks."""
    module: Any = sys.modules.get("transformers.masking_utils")
    if module is None:
        return
    if hasattr(module, "find_packed_sequence_indices"):
        _replace(stack, module, "find_packed_sequence_indices", _not_packed)
    for name, look in (("_ignore_causal_mask_sdpa", _sum_all), ("_ignore_bidirectional_mask_sdpa", torch.all)):
        if hasattr(module, name):
            _replace(stack, module, name, _not_padded(getattr(module, name), look))


def _not_packed(position_ids: torch.Tensor) -> None:
    before = position_ids[:, :1] - 1
    steps = torch.diff(position_ids, prepend=before, dim=-1)
    number = (steps != 1).cumsum(-1)
    (number[:, -1] == 0).all()


def _not_padded(original: Any, look: Any) -> Any:
    """Whether attention can do without a mask, where that depends on a mask without content."""

    @wraps(original)
    def ignores(padding_mask: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> bool:
        if padding_mask is None or not (padding_mask.is_meta or isinstance(padding_mask, FakeTensor)):
            return original(padding_mask, *args, **kwargs)
        ignored = original(None, *args, **kwargs)
        if ignored:
            look(padding_mask)  # what is made on the way
        return ignored

    return ignores


def _sum_all(mask: torch.Tensor) -> None:
    mask.sum().eq(mask.numel())

"""Tensor and sequence parallelism: how the modules of a decoder are divided over a device mesh, with DTensor.

Attention and feed-forward are divided by columns, then by rows, so that each needs one collective in forward; the
embedding is divided by vocabulary, and so are the logits, which the loss then takes as they are (`loss_parallel`). With
sequence parallelism, hidden states between them are divided along the sequence. They are plain local tensors at every
layer's ends, so that a layer under recomputation or at a pipeline's boundary need not know.

Source: M. Shoeybi et al., "Megatron-LM", arXiv 1909.08053; V. Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models", arXiv 2205.05198.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from evenload.errors import EvenloadError
from evenload.runtime.parts import Parts

SEQUENCE: Final = 1
"""Dimension of the hidden states that is the sequence: [batch, sequence, width]."""
_HEADS: Final = 2
"""Dimension of queries and keys that counts the heads where their norms see them: [batch, sequence, heads, width]."""
_QUERY, _KEY_VALUE, _OUT = "q_proj", ("k_proj", "v_proj"), "o_proj"
_COLUMNS: Final = ("gate_proj", "up_proj")
_ROWS: Final = "down_proj"
_HEAD_NORMS: Final = ("q_norm", "k_norm")


def apply_tensor_parallel(parts: Parts, mesh: DeviceMesh, *, sequence_parallel: bool = False) -> None:
    """Divide the modules of a decoder over a mesh of one dimension, in place.

    The layers take and return local tensors: [batch, sequence, width], with sequence parallelism the rank's part of the
    sequence; rotary position embeddings stay those of the whole sequence. A head returns logits as a DTensor divided by
    vocabulary: compute the loss and its backward inside `torch.distributed.tensor.parallel.loss_parallel()`. Under
    sequence parallelism the embedding returns a DTensor too, whose shape is that of the whole sequence, so that the
    code between embedding and first layer makes positions and masks of the right size.

    Args:
        parts: what is divided.
        mesh: one dimension, of the ranks that share each layer.
        sequence_parallel: divide hidden states between attention and feed-forward along the sequence.

    Raises:
        EvenloadError: a module that is not known to be divisible, or sizes that the ranks do not divide.
    """
    ranks = mesh.size()
    if ranks == 1:
        return
    for number, layer in enumerate(parts.layers):
        plan = _layer_plan(layer, f"layer {number}", ranks, sequence_parallel=sequence_parallel)
        _parallelize(layer, mesh, plan)
    hidden = _hidden(sequence_parallel=sequence_parallel)
    tied = parts.embedding is not None and parts.head is not None and _weight(parts.embedding) is _weight(parts.head)
    if parts.embedding is not None:
        _check_divides(ranks, int(_weight(parts.embedding).shape[0]), "the {size} rows of the embedding")
        style = RowwiseParallel(
            input_layouts=Replicate(), output_layouts=hidden, use_local_output=not sequence_parallel
        )
        _parallelize(parts.embedding, mesh, style)
        if sequence_parallel:
            parts.layers[0].register_forward_pre_hook(_local)
    if parts.norm is not None:
        _parallelize(parts.norm, mesh, _norm(sequence_parallel=sequence_parallel))
    if parts.head is not None:
        _check_divides(ranks, int(_weight(parts.head).shape[0]), "the {size} rows of the head")
        style = ColwiseParallel(input_layouts=hidden, output_layouts=Shard(-1), use_local_output=False)
        _parallelize(parts.head, mesh, style)
        if tied:
            cast("Any", parts.head).weight = _weight(cast("nn.Module", parts.embedding))


def _local(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a layer works on is the rank's part, as a plain tensor."""
    return tuple(one.to_local() if isinstance(one, DTensor) else one for one in args)


class Replicated(ParallelStyle):
    """A module that every rank runs as a whole; its parameters become DTensors, which optimizers cannot mix."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        whole = (Replicate(),)

        def wrap(_module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return (DTensor.from_local(inputs[0], mesh, whole, run_check=False), *inputs[1:])

        def unwrap(_module: nn.Module, outputs: Any, _mesh: DeviceMesh) -> Any:
            return outputs.to_local()

        return distribute_module(module, device_mesh, None, wrap, unwrap)


def _layer_plan(layer: nn.Module, name: str, ranks: int, *, sequence_parallel: bool) -> Mapping[str, ParallelStyle]:
    """The style of every module of a layer that holds parameters."""
    plan: dict[str, ParallelStyle] = {}
    hidden = _hidden(sequence_parallel=sequence_parallel)
    for path, module in layer.named_children():
        inside = dict(module.named_children())
        if not any(True for _ in module.parameters()):
            continue
        if _OUT in inside and _QUERY in inside:
            plan |= _attention_plan(path, module, f"{name}.{path}", ranks, hidden)
        elif _ROWS in inside:
            plan |= _feed_forward_plan(path, module, f"{name}.{path}", ranks, hidden)
        elif _is_norm(module):
            plan[path] = _norm(sequence_parallel=sequence_parallel)
        else:
            raise _unknown(f"{name}.{path}", module)
    if any(True for _ in layer.parameters(recurse=False)):
        raise _unknown(name, layer)
    return plan


def _attention_plan(
    path: str, module: nn.Module, name: str, ranks: int, hidden: Placement
) -> Mapping[str, ParallelStyle]:
    """Heads are dealt to the ranks; norms of single heads see those of the rank only."""
    width = getattr(module, "head_dim", None)
    inside = dict(module.named_children())
    projections = (_QUERY, *_KEY_VALUE, _OUT)
    if not isinstance(width, int) or not all(isinstance(inside.get(one), nn.Linear) for one in projections):
        raise _unknown(name, module)
    for one in (_QUERY, *_KEY_VALUE):
        heads = cast("nn.Linear", inside[one]).out_features // width
        _check_divides(ranks, heads, f"the {{size}} heads of {name}.{one}")
    norms = [one for one in _HEAD_NORMS if one in inside]
    for one in norms:
        if tuple(_weight(inside[one]).shape) != (width,):
            raise _unknown(f"{name}.{one}", inside[one])
    _check_all_known(name, module, {*projections, *norms})
    return {
        path: PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": hidden}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        **{f"{path}.{one}": ColwiseParallel() for one in (_QUERY, *_KEY_VALUE)},
        **{f"{path}.{one}": SequenceParallel(sequence_dim=_HEADS, use_local_output=True) for one in norms},
        f"{path}.{_OUT}": RowwiseParallel(output_layouts=hidden),
    }


def _feed_forward_plan(
    path: str, module: nn.Module, name: str, ranks: int, hidden: Placement
) -> Mapping[str, ParallelStyle]:
    """Columns of the first products are dealt to the ranks, and with them the rows of the last."""
    inside = dict(module.named_children())
    columns = [one for one in _COLUMNS if one in inside]
    if not all(isinstance(inside[one], nn.Linear) for one in (*columns, _ROWS)):
        raise _unknown(name, module)
    _check_all_known(name, module, {*columns, _ROWS})
    width = cast("nn.Linear", inside[_ROWS]).in_features
    _check_divides(ranks, width, f"the {{size}} columns of {name}")
    return {
        path: PrepareModuleInput(input_layouts=(hidden,), desired_input_layouts=(Replicate(),)),
        **{f"{path}.{one}": ColwiseParallel() for one in columns},
        f"{path}.{_ROWS}": RowwiseParallel(output_layouts=hidden),
    }


def _hidden(*, sequence_parallel: bool) -> Placement:
    """How hidden states are divided between attention and feed-forward."""
    return Shard(SEQUENCE) if sequence_parallel else Replicate()


def _norm(*, sequence_parallel: bool) -> ParallelStyle:
    return SequenceParallel(sequence_dim=SEQUENCE, use_local_output=True) if sequence_parallel else Replicated()


def _is_norm(module: nn.Module) -> bool:
    own = dict(module.named_parameters())
    return set(own) <= {"weight", "bias"} and all(parameter.dim() == 1 for parameter in own.values())


def _weight(module: nn.Module) -> nn.Parameter:
    return cast("Any", module).weight


def _parallelize(module: nn.Module, mesh: DeviceMesh, plan: ParallelStyle | Mapping[str, ParallelStyle]) -> None:
    parallelize_module(module, mesh, cast("Any", plan))


def _check_all_known(name: str, module: nn.Module, known: set[str]) -> None:
    """Everything with parameters has a style: what is left out would be trained apart on every rank."""
    for path, _ in module.named_parameters():
        one = path.partition(".")[0]
        if one not in known:
            child = getattr(module, one)
            raise _unknown(f"{name}.{one}", child if isinstance(child, nn.Module) else module)


def _check_divides(ranks: int, size: int, what: str) -> None:
    if size % ranks:
        raise EvenloadError(
            f"tp {ranks} does not divide {what.format(size=size)}",
            where="$.tp",
            fix="use a degree that does; DTensor gives every rank an equal part",
        )


def _unknown(name: str, module: nn.Module) -> EvenloadError:
    experts = any("expert" in path for path, _ in cast("Any", module).named_modules())
    what = "a mixture of experts" if experts else type(module).__name__
    return EvenloadError(
        f"tensor parallelism does not know how to divide {name}, {what}",
        where="$.tp",
        fix="use tp 1 with zero 3 for it, or ask evenload estimate",
    )

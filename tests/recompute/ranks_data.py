"""What two ranks do together when each has its own data, with and without FSDP."""

from __future__ import annotations

from typing import Any

import torch
from tests.recompute.measuring import same
from tests.recompute.models import DEFAULT, FAMILIES, toy
from tests.recompute.rank_training import EVERYTHING, Training, batch
from torch import nn

from evenload.plan.policy import Policy
from evenload.recompute import apply


def ddp_llama() -> Any:
    from torch.nn.parallel import DistributedDataParallel

    model, _ = FAMILIES["llama"]()
    wrapped, ids = DistributedDataParallel(model), batch()
    training = Training(model, lambda: wrapped(input_ids=ids, labels=ids).loss)
    return [training.under(select=patterns) for patterns in (DEFAULT, (".*norm",), EVERYTHING)]


def ddp_toy() -> Any:
    from torch.nn.parallel import DistributedDataParallel

    model, _ = toy()
    wrapped, x = DistributedDataParallel(model), torch.randn(2, 16, 8)
    return [Training(model, lambda: wrapped(x)).under(select=EVERYTHING)]


def sharded(model: nn.Module, layers: Any, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(model)
    return model


def fsdp_llama() -> Any:
    model, _ = FAMILIES["llama"]()
    sharded(model, model.model.layers)
    ids = batch()
    training = Training(model, lambda: model(input_ids=ids, labels=ids).loss)
    return [training.under(select=patterns) for patterns in (DEFAULT, (".*norm",), EVERYTHING)]


def fsdp_toy() -> Any:
    model, _ = toy()
    sharded(model, model.layers)
    x = torch.randn(2, 16, 8)
    return [Training(model, lambda: model(x)).under(select=EVERYTHING)]


def fsdp_mixed_precision() -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model, _ = FAMILIES["llama"]()
    sharded(model, model.model.layers, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    ids = batch()
    training = Training(model, lambda: model(input_ids=ids, labels=ids).loss)
    return [training.under(select=patterns) for patterns in (DEFAULT, (".*norm",), EVERYTHING)]


def fsdp_inside_layers() -> Any:
    """Halves of a layer are gathered one by one, while the layer runs."""
    from torch.distributed.fsdp import fully_shard

    model, _ = FAMILIES["llama"]()
    for layer in model.model.layers:
        fully_shard(layer.self_attn)
        fully_shard(layer.mlp)
        fully_shard(layer)
    fully_shard(model)
    ids = batch()
    training = Training(model, lambda: model(input_ids=ids, labels=ids).loss)
    return [training.under(select=patterns) for patterns in (DEFAULT, EVERYTHING)]


def fsdp_after_apply() -> Any:
    model, _ = FAMILIES["llama"]()
    ids = batch()
    handle = apply(model, select=EVERYTHING)
    sharded(model, model.model.layers)
    training = Training(model, lambda: model(input_ids=ids, labels=ids).loss)
    predicted, kept = handle.report().freed, training.kept
    handle.remove()
    plain = Training(model, training.forward)
    return {"same": same(training.expected, plain.expected), "freed": plain.kept - kept, "predicted": predicted}


def optimizer_comm() -> Any:
    """`parallel_optimizer_comm_recompute`: parameters are gathered again in backward, or stay gathered."""
    results = {}
    for first in (True, False):
        model, _ = FAMILIES["llama"]()
        sharded(model, model.model.layers, reshard_after_forward=first)
        ids = batch()
        training = Training(model, lambda model=model, ids=ids: model(input_ids=ids, labels=ids).loss)
        results[first] = {
            "plain": training.collectives,
            "again": training.under(Policy(optimizer_comm=True)),
            "kept": training.under(Policy(), optimizer_comm=False),
            "as it was": training.under(Policy()),
            "restored": training.step()[1],
        }
    return results


SCENARIOS = (
    ddp_llama,
    ddp_toy,
    fsdp_llama,
    fsdp_toy,
    fsdp_mixed_precision,
    fsdp_inside_layers,
    fsdp_after_apply,
    optimizer_comm,
)

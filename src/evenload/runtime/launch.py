"""Processes of a run: how they find each other, and how they fail with one voice."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
from torch import distributed

from evenload.errors import EvenloadError, behind


class Silent(EvenloadError):  # noqa: N818  # no error of its own
    """Another rank says what is wrong."""


@contextmanager
def joined(processes: int, *, timeout: int) -> Generator[None]:
    """Be one of a run's processes, as torchrun has started them, for as long as the block lasts.

    A run of one process needs no torchrun.

    Args:
        processes: how many the plan needs.
        timeout: seconds after which ranks give up waiting for each other.

    Raises:
        EvenloadError: another number of processes has been started, or they cannot find each other.
    """
    world = os.environ.get("WORLD_SIZE", "1")
    if world != str(processes):
        error = EvenloadError(
            f"the plan is for {processes} processes, and {world} {'runs' if world == '1' else 'run'}",
            where="WORLD_SIZE",
            fix=f"torchrun --nproc-per-node {processes} -m evenload train ...",
        )
        raise error if os.environ.get("RANK", "0") == "0" else Silent(error.fact)
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout)}
    gpu = torch.cuda.is_available() and torch.cuda.device_count() > int(os.environ.get("LOCAL_RANK", "0"))
    if gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        options["device_id"] = device
    if "MASTER_ADDR" not in os.environ:
        options |= {"rank": 0, "world_size": 1, "store": cast("Any", distributed).HashStore()}
    try:
        distributed.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", **options)
    except (RuntimeError, ValueError) as error:
        raise EvenloadError(
            f"the processes cannot find each other: {error}", fix="start them with torchrun, on a free port"
        ) from error
    try:
        yield
    finally:
        distributed.destroy_process_group()


@contextmanager
def agreed(group: distributed.ProcessGroup | None = None) -> Generator[None]:
    """What fails on one rank inside the block ends it on all; the lowest rank that failed says why.

    The block itself must not talk to other ranks.

    Args:
        group: the ranks that agree; None: all.

    Raises:
        EvenloadError: on that rank, as it was raised.
        Silent: on all others.
    """
    own: EvenloadError | None = None
    try:
        yield
    except EvenloadError as error:
        own = error
    mine = None if own is None else _Failure(own.fact, own.exit_code, isinstance(own, Silent))
    found: list[_Failure | None] = [None] * distributed.get_world_size(group)
    cast("Any", distributed).all_gather_object(found, mine, group=group)
    failed = [(rank, one) for rank, one in enumerate(found) if one is not None]
    if not failed:
        return
    rank, failure = next(((rank, one) for rank, one in failed if not one.silent), failed[0])
    if own is not None and rank == distributed.get_rank(group):
        raise own
    raise Silent(f"rank {rank}: {failure.fact}", exit_code=failure.exit_code)


class _Failure(NamedTuple):
    fact: str
    exit_code: int
    silent: bool
    """Another rank says it."""


def common(error: EvenloadError) -> EvenloadError:
    """An error that every rank finds, as the one that rank 0 raises and the others keep silent about."""
    return error if distributed.get_rank() == 0 else Silent(error.fact, exit_code=error.exit_code)


@contextmanager
def together() -> Generator[None]:
    """Say in words that another rank is gone, where a collective fails.

    Raises:
        EvenloadError: one has ended, or does not answer.
    """
    try:
        yield
    except RuntimeError as error:
        if not _is_about_others(error):
            raise
        line = next(iter(str(error).strip().splitlines()), "")
        raise EvenloadError(
            f"rank {distributed.get_rank()} lost another rank: {line}",
            fix="see what that rank says; with --checkpoints and --resume a run goes on where it was saved",
            exit_code=1,
        ) from error


def _is_about_others(error: BaseException | None) -> bool:
    """Whether an error, or one behind it, came from talking to other ranks."""
    return any(
        isinstance(one, distributed.DistError) or any(word in str(one) for word in _LOST) for one in behind(error)
    )


_LOST = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Broken pipe", "gloo")

"""Checkpoints of a run, by `torch.distributed.checkpoint`: by the names of the whole model, whatever the plan.

`DIRECTORY/step-00000100/` is whole when `evenload.json` is in it, which is written last.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, Final, cast

import msgspec
import torch
from torch import distributed
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from evenload._version import __version__
from evenload.errors import EvenloadError
from evenload.files import read_json, write_text
from evenload.runtime.launch import agreed, common
from evenload.runtime.pipeline import Pipeline

MARK: Final = "evenload.json"
LOCK: Final = ".lock"
"""File in a directory of checkpoints that its run keeps locked; the system lets go of it however the run ends."""
FORMAT: Final = 1
"""Of what is in a checkpoint."""
_OTHER: Final = "it is of another model"
_STEP: Final = re.compile(r"step-(\d{8})")
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
_SAVER: Final = cast("Any", state_dict_saver)
_LOADER: Final = cast("Any", state_dict_loader)


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a checkpoint."""

    evenload: str
    step: int
    """Steps of the optimizer that are done."""
    seed: int
    """Of the order of the data."""
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A whole checkpoint."""

    path: Path
    mark: Mark


def newest(directory: str | Path) -> Saved | None:
    """The newest whole checkpoint in a directory; None: there is none.

    Raises:
        EvenloadError: it cannot be read.
    """
    found = _whole(Path(directory))
    if not found:
        return None
    path = found[-1]
    try:
        mark = msgspec.convert(read_json(path / MARK), Mark)
    except msgspec.ValidationError as error:
        raise EvenloadError(
            f"this is no mark of a checkpoint: {error}", where=str(path / MARK), fix=f"remove {path}, or name another"
        ) from None
    if mark.format > FORMAT:
        raise EvenloadError(
            f"the checkpoint has format {mark.format}, evenload {__version__} reads {FORMAT}",
            where=str(path),
            fix=f"go on with evenload {mark.evenload}, which wrote it",
        )
    return Saved(path=path, mark=mark)


def refuse_foreign(directory: str | Path) -> None:
    """Make sure that no run has saved in a directory in which another is to begin.

    Raises:
        EvenloadError: one has; the new run would remove its checkpoints.
    """
    if found := _whole(Path(directory)):
        raise EvenloadError(
            f"the directory has checkpoints of a run, up to {found[-1].name}",
            where=str(directory),
            fix="go on with that run: --resume; or name another directory",
        )


@contextmanager
def claimed(directory: str | Path) -> Generator[None]:
    """Keep other runs out of a directory of checkpoints, for as long as the block lasts; called on all ranks.

    Raises:
        EvenloadError: another run saves there, or nothing can be written there.
    """
    root, lock = Path(directory), None
    with agreed(), _writing(root):
        if distributed.get_rank() == 0:
            root.mkdir(parents=True, exist_ok=True)
            lock = _locked(root / LOCK)
    try:
        yield
    finally:
        if lock is not None:
            lock.close()


def _locked(path: Path) -> IO[str] | None:
    """A file that is locked until it is closed; None: this system locks no files."""
    if sys.platform == "win32":
        return None
    import fcntl  # noqa: PLC0415  # there is none elsewhere

    file = path.open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise EvenloadError(
            "another run that is still going saves there", where=str(path.parent), fix="name another directory"
        ) from None
    except OSError:  # a file system without locks
        pass
    return file


def save(
    directory: str | Path, pipeline: Pipeline, optimizer: torch.optim.Optimizer, *, step: int, seed: int, keep: int
) -> Path:
    """Write a checkpoint, together with all other ranks, and remove all but the newest.

    Raises:
        EvenloadError: it cannot be written.
    """
    root = Path(directory)
    path = root / f"step-{step:08d}"
    first = distributed.get_rank() == 0
    with agreed(), _writing(path):
        if first and path.exists():
            shutil.rmtree(path)  # of a run that died while it wrote
        if first:
            path.mkdir(parents=True)
    with _writing(path):
        _SAVER.save(_state(pipeline, optimizer), checkpoint_id=str(path))
    with agreed(), _writing(path):
        if first:
            mark = Mark(evenload=__version__, step=step, seed=seed)
            write_text(path / MARK, msgspec.json.encode(mark).decode() + "\n")
            for old in _whole(root)[:-keep]:
                shutil.rmtree(old, ignore_errors=True)
    return path


@contextmanager
def _writing(path: Path) -> Generator[None]:
    try:
        yield
    except (OSError, CheckpointException) as error:
        fix = "make room there, or name another directory with --checkpoints"
        raise EvenloadError(f"cannot write the checkpoint: {_reason(error)}", where=str(path), fix=fix) from error


def _reason(error: BaseException) -> str:
    """What went wrong on the first rank on which something did."""
    if isinstance(error, CheckpointException):
        failure = next(iter(error.failures.values()), None)
        return _reason(failure[0]) if failure is not None else str(error)
    text = error.strerror if isinstance(error, OSError) else str(error)
    return next(iter((text or type(error).__name__).splitlines()), "")


def load(saved: Saved, pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> None:
    """Put a checkpoint into a model and its optimizer, together with all other ranks; the plan may be another.

    Raises:
        EvenloadError: it is of another model.
    """
    place = str(saved.path)
    with agreed():
        for parameter in pipeline.parameters():
            if parameter.requires_grad:
                optimizer.state[parameter] = _fresh(parameter, optimizer)
        state = _state(pipeline, optimizer)
        reader = FileSystemReader(saved.path)
        try:
            known = cast("Mapping[str, Any]", reader.read_metadata().state_dict_metadata)
        except Exception as error:  # whatever a damaged file makes of the reader
            raise _unreadable(error, place) from error
        _check(known, state, place)
    _check_whole(known, state, place)
    try:
        _LOADER.load(state, storage_reader=reader)
    except CheckpointException as error:
        raise common(_unreadable(error, place)) from error


def _unreadable(error: BaseException, place: str) -> EvenloadError:
    return EvenloadError(
        f"the checkpoint cannot be read: {_reason(error)}", where=place, fix="remove it: the one before it is resumed"
    )


def _state(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """This rank's tensors by names that do not depend on the plan."""
    state: dict[str, Any] = {}
    for name, parameter in pipeline.named_parameters().items():
        state[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"optimizer.{name}.{key}"] = value
    state |= {f"buffer.{name}": buffer for name, buffer in pipeline.named_buffers().items()}
    return state


def _fresh(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The state of a parameter that AdamW has not seen yet."""
    fused = any(group.get("fused") for group in optimizer.param_groups)
    device = parameter.device if fused else torch.device("cpu")
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        **{name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in _MOMENTS},
    }


def _check(known: Mapping[str, Any], state: Mapping[str, Any], place: str) -> None:
    for name, value in state.items():
        if name not in known:
            raise EvenloadError(f"the checkpoint has no {name.removeprefix('model.')!r}", where=place, fix=_OTHER)
        size = getattr(known[name], "size", None)
        if size is not None and tuple(size) != tuple(value.shape):
            raise EvenloadError(
                f"{name.removeprefix('model.')} is {tuple(size)} in the checkpoint and {tuple(value.shape)} here",
                where=place,
                fix=_OTHER,
            )


def _check_whole(known: Mapping[str, Any], state: Mapping[str, Any], place: str) -> None:
    """Make sure that the ranks together have all of the model that was saved."""
    found: list[list[str]] = [[] for _ in range(distributed.get_world_size())]
    cast("Any", distributed).all_gather_object(found, [name for name in state if name.startswith("model.")])
    here = set(chain.from_iterable(found))
    if left := next((name for name in known if name.startswith("model.") and name not in here), None):
        fact = f"the checkpoint has {left.removeprefix('model.')!r}, which this model does not have"
        raise common(EvenloadError(fact, where=place, fix=_OTHER))


def _whole(root: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if _STEP.fullmatch(path.name) and (path / MARK).is_file())

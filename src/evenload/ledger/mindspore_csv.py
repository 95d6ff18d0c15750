"""MindSpore's `memory_block.csv`, written by `MS_ALLOC_CONF=memory_tracker:True`, as a ledger.

Both layouts are read (2.7 and 2.10 have different columns): columns are found by name. Stamps in the file count events,
one for every task, allocation and free, so they are indexes already.

Three peaks follow from it as in MindSpore's own analysis: needed from the task that makes a block to its last user,
held from allocation to free in the default pool, reserved as the pool itself says (`actual_peak_memory`).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from evenload._version import __version__
from evenload.errors import EvenloadError, Notice
from evenload.ledger.builder import Builder
from evenload.ledger.ledger import ALIVE, HostLine, Ledger, Metadata
from evenload.ledger.words import Category

NEEDED_COLUMNS: Final = ("start_time_stamp", "end_time_stamp", "size")
ORIGIN: Final = "MindSpore memory tracker"
_NEVER: Final = 9 * 10**18
"""Stamps above are the sentinel of blocks that were never freed, 2**63 - 1."""
_CATEGORIES: Final = {
    "Weight": Category.PARAMETER,
    "PyNativeInput": Category.INPUT,
    "WorkSpace": Category.TEMPORARY,
}
"""What the type of a block says for sure; `Kernel`, `PyNativeOutput` and others may be anything."""
_FRAMEWORK: Final = ("mindspore/nn/cell.py", "mindspore/common/", "mindspore/ops/", "traceback.py")
_FRAME: Final = re.compile(r"File:(?P<file>[^;|]*);\s*Line:(?P<line>[^;|]*)(?:;\s*Function:(?P<name>[^|]*))?")


def is_memory_block(text: str) -> bool:
    """Whether a text begins with the columns of `memory_block.csv`."""
    head = {name.strip() for name in text.lstrip("\ufeff").partition("\n")[0].split(",")}
    return head.issuperset(NEEDED_COLUMNS)


def read_memory_block(path: str | Path) -> Ledger:
    """The ledger in a `memory_block.csv`.

    Raises:
        EvenloadError: the file cannot be read, is no such file, or a row of it makes no sense.
    """
    place = str(path)
    try:
        raw = Path(path).read_bytes()
    except FileNotFoundError:
        raise EvenloadError("there is no such file", where=place, fix="check the path") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise EvenloadError(f"cannot read the file: {(reason or str(error)).lower()}", where=place) from None
    return memory_block_ledger(raw.decode("utf-8-sig", errors="replace"), place=place)


def memory_block_ledger(text: str, *, place: str = "memory_block.csv") -> Ledger:
    """The ledger in the text of a `memory_block.csv`; `place` is what errors call it.

    Raises:
        EvenloadError: it has no such columns, or a row makes no sense.
    """
    if not text.strip():
        raise EvenloadError("the file is empty", where=place)
    if not is_memory_block(text):
        raise EvenloadError(
            "this is no memory_block.csv: it has no columns " + ", ".join(NEEDED_COLUMNS),
            where=f"{place}:1",
            fix="give the file that MS_ALLOC_CONF=memory_tracker:True writes, with its first line",
        )
    blocks = list(_blocks(text.lstrip("\ufeff"), place))
    return _ledger(blocks, place)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """One row; stamps as they stand in the file, -1 for none."""

    start: int
    end: int
    nbytes: int
    pool: str
    pool_peak: int
    kind: str
    made: int
    users: tuple[int, ...]
    operator: str
    node: str
    stack: tuple[str, ...]
    stream: str


def _blocks(text: str, place: str) -> Iterator[_Block]:
    rows = csv.reader(io.StringIO(text, newline=""))
    head = [name.strip() for name in next(rows)]
    while head and not head[-1]:
        head.pop()
    column = {name: position for position, name in enumerate(head)}
    try:
        for row in rows:
            if not any(cell.strip() for cell in row):
                continue
            where = f"{place}:{rows.line_num}"
            yield _block(_cells(row, head, column, where), where)
    except csv.Error as error:
        where = f"{place}:{rows.line_num}"
        raise EvenloadError(f"the row cannot be read: {error}", where=where, fix="copy the file again") from None


def _cells(row: list[str], head: list[str], column: dict[str, int], where: str) -> Callable[[str], str]:
    """Looks cells up by name; commas inside the stack, which is not quoted, are put back."""
    surplus = len(row) - len(head) - (1 if row[-1] == "" else 0)
    stack = column.get("python_stack")
    if surplus > 0 and stack is not None:
        row = [*row[:stack], ",".join(row[stack : stack + surplus + 1]), *row[stack + surplus + 1 :]]
    if len(row) < len(head):
        raise EvenloadError(
            f"the row has {len(row)} cells for {len(head)} columns: the file breaks off here",
            where=where,
            fix="remove the last line, or copy the file again after the program has ended",
        )
    return lambda name: row[column[name]].strip() if name in column else ""


def _block(cell: Callable[[str], str], where: str) -> _Block:
    users = tuple(_stamp(number, "user_tasks", where) for number in re.findall(r"\d+", cell("user_tasks")))
    last = cell("last_user_task")
    if not users and last.isdecimal():  # simple_tracker keeps only the last one
        users = (_stamp(last, "last_user_task", where),)
    return _Block(
        start=_stamp(cell("start_time_stamp"), "start_time_stamp", where),
        end=_integer(cell("end_time_stamp"), "end_time_stamp", where),
        nbytes=_size(cell("size"), where),
        pool=cell("pool_type"),
        pool_peak=_integer(cell("actual_peak_memory") or "-1", "actual_peak_memory", where),
        kind=cell("type"),
        made=_stamp(cell("producer_task") or "-1", "producer_task", where),
        users=users,
        operator=cell("task_name"),
        node=cell("node_name") or cell("graph_name"),
        stack=_stack(cell("python_stack")),
        stream=cell("stream_id"),
    )


def _stamp(text: str, name: str, where: str) -> int:
    """A stamp of something that happened."""
    value = _integer(text, name, where)
    if value >= _NEVER:
        _wrong(name, text, where)
    return value


def _size(text: str, where: str) -> int:
    size = _integer(text, "size", where)
    if not 0 <= size < 2**62:
        _wrong("size", text, where)
    return size


def _integer(text: str, name: str, where: str) -> int:
    try:
        value = int(text) if re.fullmatch(r"-?\d{1,19}", text) else int(float(text))
    except (ValueError, OverflowError):
        _wrong(name, text, where)
    if value < -1:
        _wrong(name, text, where)
    return value


def _wrong(name: str, text: str, where: str) -> NoReturn:
    raise EvenloadError(f"{name} is {text[:40]!r}, which is no number that can stand there", where=where)


def _stack(text: str) -> tuple[str, ...]:
    """Python lines, innermost first; the file has them outermost first."""
    lines: list[str] = []
    for match in _FRAME.finditer(text):
        file = match["file"].strip().strip('"')
        if not any(part in file for part in _FRAMEWORK):
            name = (match["name"] or "").strip()
            lines.append(f"{file}:{match['line'].strip()}" + (f" {name}" if name else ""))
    return tuple(reversed(lines))


def _ledger(blocks: list[_Block], place: str) -> Ledger:
    builder = Builder()
    device = builder.device("npu")
    pools = {block.pool for block in blocks}
    others = {pool for pool in pools if pool and not pool.lower().startswith("default")}
    if others == pools:
        others = set[str]()
    last = max(
        (stamp for block in blocks for stamp in (block.start, block.end, *block.users) if stamp < _NEVER), default=-1
    )
    for block in blocks:
        _add(builder, block, builder.device(f"npu, {block.pool}") if block.pool in others else device, place)
    reserved = max((block.pool_peak for block in blocks), default=-1)
    host = HostLine(step=0, index=last + 2, time=0, resident=-1, pinned=-1, reserved=reserved)
    return builder.ledger(
        Metadata(evenload=__version__, origin=ORIGIN, device="npu", stacks=any(block.stack for block in blocks)),
        end=last + 2,
        host=(host,),
        notices=_notices(blocks, place),
    )


def _add(builder: Builder, block: _Block, device: int, place: str) -> None:
    """One row. Indexes are stamps plus one, because index 0 means that a block was there before."""
    last_used = max(block.users) + 1 if block.users else 0
    if block.start < 0:  # inside a larger block that the graph allocates as one: needed, not held by itself
        if block.made < 0 or not block.users:
            return
        allocated = freed = block.made + 1
    else:
        allocated = block.start + 1
        freed = ALIVE if not 0 <= block.end < _NEVER else block.end + 1
    if freed < allocated:
        raise EvenloadError(
            f"a block is freed at {block.end}, before it is allocated at {block.start}",
            where=place,
            fix="make sure that the file is of one run: old files are not cleared",
        )
    builder.allocation(
        nbytes=block.nbytes,
        allocated=allocated,
        last_used=last_used,
        freed=freed,
        category=_CATEGORIES.get(block.kind, Category.UNKNOWN),
        device=device,
        module=block.node,
        operator=block.operator or block.kind,
        source=builder.stack(block.stack),
        made=block.made + 1 if block.made >= 0 else -1,
    )


def _notices(blocks: list[_Block], place: str) -> list[Notice]:
    notices: list[Notice] = []
    if not blocks:
        notices.append(
            Notice(
                fact="the file has no blocks: MindSpore writes them for devices only, not for the CPU",
                where=place,
                fix="record on a device, or as a dry run with MS_SIMULATION_LEVEL",
            )
        )
    elif not any(block.stack for block in blocks):
        notices.append(
            Notice(
                fact="no block has a Python line",
                where=place,
                fix="record with mindspore.runtime.launch_blocking() or MS_DEV_LAUNCH_BLOCKING=1",
            )
        )
    return notices

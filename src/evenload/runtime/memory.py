"""What every rank was predicted to hold, and what it held."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from evenload.errors import EvenloadError
from evenload.files import write_text
from evenload.ledger.curve import by_category, curve, live
from evenload.ledger.ledger import Ledger
from evenload.ledger.words import MarkKind
from evenload.runtime.pace import StepTime
from evenload.units import human_bytes


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One rank. Bytes."""

    rank: int
    predicted: int | None = None
    """Peak of a step, as all but the first are; None: it could not be rehearsed."""
    predicted_first: int | None = None
    """Peak of the first step."""
    held: dict[str, int] = {}
    """What that peak is made of, by category."""
    measured: int | None = None
    """Peak of a step of the run; None: nothing measured it yet."""
    why: str | None = None
    """Why there is no prediction."""

    @property
    def error(self) -> float | None:
        """Measured above predicted, as a share of predicted."""
        if not self.predicted or self.measured is None:
            return None
        return self.measured / self.predicted - 1


def of_ledger(rank: int, ledger: Ledger) -> RankMemory:
    """The prediction that a rehearsal gives."""
    peaks = step_peaks(ledger)
    running, begin = curve(ledger), _begins(ledger)[1]
    later = running.index >= begin
    at = int(running.index[later][running.level[later].argmax()])
    held = {category.value: nbytes for category, nbytes in by_category(ledger, live(ledger, at)).items() if nbytes}
    return RankMemory(rank=rank, predicted=peaks[1], predicted_first=peaks[0], held=held)


def step_peaks(ledger: Ledger) -> list[int]:
    """Highest bytes of every step of a ledger.

    Raises:
        EvenloadError: it has no steps.
    """
    running = curve(ledger)
    begins = _begins(ledger)
    if not begins:
        raise EvenloadError("the ledger has no steps", fix="record training steps")
    found: list[int] = []
    for begin, end in zip(begins, [*begins[1:], None], strict=True):
        inside = running.level[(running.index >= begin) & (running.index < (end if end is not None else 2**62))]
        if len(inside):
            found.append(max(int(inside.max()), running.at(begin)))
    return found


def write_memory(path: str | Path, ranks: Sequence[RankMemory], step_time: StepTime | None = None) -> None:
    """Write what is known of all ranks so far, and of the time of a step, as JSON.

    Raises:
        EvenloadError: the file cannot be written.
    """
    known = {"ranks": ranks} if step_time is None else {"ranks": ranks, "step_time": step_time}
    write_text(path, msgspec.json.format(msgspec.json.encode(known), indent=2).decode() + "\n", force=True)


def free_name(directory: str | Path) -> str:
    """A file for the peaks of a run that is not there yet."""
    root, number = Path(directory), 1
    while (path := root / f"evenload-memory{'' if number == 1 else f'-{number}'}.json").exists():
        number += 1
    return str(path)


def table(ranks: Sequence[RankMemory]) -> str:
    """Predicted and measured peaks, one line a rank."""
    lines = ["rank      predicted       measured     difference"]
    for one in ranks:
        predicted = human_bytes(one.predicted) if one.predicted is not None else "-"
        measured = human_bytes(one.measured) if one.measured is not None else "-"
        error = "-" if one.error is None else f"{one.error:+.2%}" if one.error else "none"
        lines.append(f"{one.rank:<4}{predicted:>15}{measured:>15}{error:>15}")
    if why := next((one.why for one in ranks if one.why), None):
        lines.append(f"no prediction: {why}")
    return "\n".join(lines)


def _begins(ledger: Ledger) -> list[int]:
    return [mark.index for mark in ledger.marks if mark.kind is MarkKind.STEP]

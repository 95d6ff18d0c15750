"""Which allocator setting the gap between what tensors hold and what the allocator holds argues for."""

from __future__ import annotations

from typing import Final

from evenload.ledger.curve import Peaks
from evenload.ledger.mindspore_csv import ORIGIN as MINDSPORE
from evenload.ledger.settings import AllocConf
from evenload.units import human_bytes

WORTH: Final = 0.1
"""Share of what is held from which a gap is worth a setting."""


def advise(peaks: Peaks, origin: str, conf: AllocConf | None = None) -> str | None:
    """What to set, in one sentence; None: the gap is small or not known.

    Args:
        peaks: of a recording.
        origin: what the recording was made by.
        conf: settings that were on; None: not known. What is on is never advised.
    """
    if peaks.reserved is None or peaks.reserved - peaks.held <= WORTH * peaks.held:
        return None
    gap = f"{human_bytes(peaks.reserved - peaks.held)} of what is reserved are rounding and fragmentation"
    setting = "enable_vmm:True" if origin == MINDSPORE else "expandable_segments:True"
    if conf is None:
        return f"{gap}: {setting} makes less of it, unless it is on already"
    if not conf.on(setting.partition(":")[0]):
        return f"{gap}: set {setting}"
    if "max_split_size_mb" in conf.settings:
        return f"{gap}: remove max_split_size_mb, which works against {setting}"
    return f"{gap}, although segments can grow: use fewer streams, and free large tensors of one phase before the next"

"""Out-of-memory messages in a text: every wording of PyTorch's allocators since 1.0, and what others say.

Only what a message says is read; what follows from it is in `oom_reasons`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from evenload.ledger.oom_foreign import not_ours

Allocator = Literal["native", "asynchronous", "metal", "host", "mindspore", "outside"]
"""Who ran out: PyTorch's caching allocator, `backend:cudaMallocAsync`, Apple's, the host's, MindSpore's, or a library
that asks the driver itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """What one message says, in bytes; None: it does not say."""

    allocator: Allocator
    device: str
    """`cuda:0`; without a number where the message has none."""
    line: int
    """Line of the text that it begins on."""
    rank: int | None = None
    """Rank that the log names."""
    source: str | None = None
    """Innermost Python line of the traceback before it that is not PyTorch's: `file:line function`."""
    asked: int | None = None
    capacity: int | None = None
    free: int | None = None
    allowed: int | None = None
    """Limit of the process, below that of the device: set by the user, or the pool that MindSpore took."""
    allocated: int | None = None
    """Tensors, private pools included."""
    private: int | None = None
    """Part of `allocated` in private pools (CUDA graphs, memory pools)."""
    reserved: int | None = None
    """What PyTorch's allocator holds: `allocated` and what it has not handed out."""
    process: int | None = None
    """What the driver counts for this process."""
    others: tuple[tuple[int, int], ...] = ()
    """Other processes: number and bytes."""
    inferred: int | None = None
    """Number of the process that is this one, where the message does not say which (containers)."""
    tip: str | None = None
    """Setting that the message itself recommends."""
    dated: bool = False
    """Whether a PyTorch before 2.1 wrote it, which knows fewer settings."""
    count: int = field(default=1, compare=False)
    """How often the text repeats it."""

    @property
    def unallocated(self) -> int | None:
        """What PyTorch's allocator holds and has not handed out."""
        if self.reserved is None or self.allocated is None:
            return None
        return max(0, self.reserved - self.allocated)

    @property
    def outside(self) -> int | None:
        """What this process holds beside PyTorch's allocator: context, NCCL, other libraries."""
        if self.process is None or self.reserved is None:
            return None
        return max(0, self.process - self.reserved)

    @property
    def elsewhere(self) -> int | None:
        """What is in use and not by this process."""
        if self.capacity is not None and self.free is not None and self.process is not None:
            rest = self.capacity - self.free - self.process
            return rest if rest > _ROUNDING else 0
        return sum(nbytes for _, nbytes in self.others) if self.others else None

    @property
    def unexplained(self) -> int | None:
        """What is in use beside PyTorch's allocator, where the message does not tell by whom."""
        if self.process is not None or self.capacity is None or self.free is None or self.reserved is None:
            return None
        return max(0, self.capacity - self.free - self.reserved - (self.elsewhere or 0))


_ROUNDING: Final = 2**24
"""Messages print hundredths of a GiB: what three such numbers leave over below this is nobody's memory."""
_GAP: Final = r"\s+(?:\[rank\d+\]:\s*)?"
"""White space in a message that torchrun may have broken into lines, each with its rank."""
_SIZE: Final = r"([0-9][0-9.,]*)\s*(bytes|[KMGT]i?B|B|[KMG]\b)"
_UNITS: Final = {"": 1, "bytes": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_BINARY: Final = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "asked": (
        rf"Unable\s+to\s+allocate\s+{_SIZE}",
        r"rtMalloc failed.{0,80}size:\s*(\d+)()",
        rf"[Tt]ried\s+to\s+allocate\s+{_SIZE}",
        rf"Requested\s*:\s*{_SIZE}",
        rf"Request memory size:\s*{_SIZE}",
        rf"alloc size:\s*{_SIZE}",
    ),
    "capacity": (
        rf"total\s+capac?i?ty\s+of\s+{_SIZE}",
        rf"{_SIZE}\s+total\s+capacity",
        rf"Device limit\s*:\s*{_SIZE}",
        rf"Device (?:HBM|MOC) memory size:\s*{_SIZE}",
    ),
    "free": (
        rf"of\s+which\s+{_SIZE}\s+is\s+free",
        rf"{_SIZE}\s+free\s*[;)]",
        rf"Free \(according to CUDA\)\s*:\s*{_SIZE}",
    ),
    "allowed": (rf"{_SIZE}\s+allowed\b", rf"max allowed:\s*{_SIZE}", rf"MindSpore Used memory size:\s*{_SIZE}"),
    "allocated": (
        rf"{_SIZE}\s+is\s+allocated\s+by\s+PyTorch",
        rf"{_SIZE}\s+already\s+allocated",
        rf"Currently allocated\s*:\s*{_SIZE}",
        rf"MPS allocated:\s*{_SIZE}",
    ),
    "private": (rf"{_SIZE}\s+allocated\s+in\s+private\s+pools",),
    "unallocated": (rf"{_SIZE}\s+is\s+reserved\s+by\s+PyTorch\s+but\s+unallocated", rf"{_SIZE}\s+cached\s*[;)]"),
    "reserved": (rf"{_SIZE}\s+reserved\s+in\s+total\s+by\s+PyTorch",),
    "process": (rf"this\s+process\s+has\s+{_SIZE}\s+memory\s+in\s+use",),
}
_OUTSIDE: Final = (
    r"(?:CUDA|HIP) (?:driver )?error:? *out of memory",
    r"cuda runtime error \(2\) : out of memory",
    r"[Cc]uda failure \d* ?'out of memory'",
    r"CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED",
    r"Failed to CUDA calloc",  # NCCL
    r"Error out of memory at line \d+ in file",  # bitsandbytes
)
_ASCEND: Final = (
    r"EL0004: .*[Ff]ailed to allocate memory",
    r"(?:rtMalloc|aclrtMalloc\w*)\b[^\n]{0,40}\bfail",
)
"""Ascend's runtime, asked by a library or by PyTorch itself."""
_HOST: Final = (
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory",
    r"ArrayMemoryError: Unable to allocate",  # NumPy
    r"std::bad_alloc",
    r"(?:[Mm]emory cgroup o|O)ut of memory: Killed process \d+",  # the kernel
    r"Detected \d+ oom[-_]kill event",  # Slurm
)
_HEADS: Final[dict[Allocator, re.Pattern[str]]] = {
    "metal": re.compile(r"MPS backend out of memory"),
    "native": re.compile(
        rf"\b(?P<device>[A-Za-z0-9]+)\s+out\s+of\s+memory[.,]?{_GAP}(?:\w*Allocator\s+t|T)ried{_GAP}to\s+allocate"
    ),
    "asynchronous": re.compile(r"Allocation on device (?P<number>\d*)\s*would exceed allowed memory"),
    "mindspore": re.compile(r"Out of Memory!!! Request memory size|Memory not enough: Device"),
    "host": re.compile("|".join(_HOST)),
    "outside": re.compile("|".join((*_OUTSIDE, *(f"(?P<ascend{number}>{one})" for number, one in enumerate(_ASCEND))))),
}
_NUMBER: Final = re.compile(r"\b(?:GPU|NPU|XPU|device|Device)\(?(?:id:)?\s*(\d+)")
_TIP: Final = re.compile(r"try\s+setting\s+(?:PYTORCH_\w*ALLOC_CONF=)?(\w+(?::\w+)?)")
_RANK: Final = re.compile(r"\[?\brank\s*[:=]?\s*(\d+)\b|\bworker[-_ ]?tp(\d+)\b", re.IGNORECASE)
_FRAME: Final = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<name>\S+))?')
_LONGEST: Final = 3000
"""No message is longer, in characters."""


def read_oom(text: str, *, place: str = "text") -> tuple[OutOfMemory, ...]:
    """Every out-of-memory message in a text, in its order; repeated ones once, with their count.

    Where there is none, the error says whose failure it is instead, if that can be told.

    Args:
        text: a message, a traceback or a whole log.
        place: what errors call it.

    Raises:
        EvenloadError: the text holds none.
    """
    heads: list[tuple[int, Allocator, re.Match[str]]] = []
    for allocator, head in _HEADS.items():
        heads.extend((match.start(), allocator, match) for match in head.finditer(text))
    heads.sort(key=lambda one: one[0])
    found: dict[OutOfMemory, OutOfMemory] = {}
    for number, (start, allocator, match) in enumerate(heads):
        end = heads[number + 1][0] if number + 1 < len(heads) else len(text)
        message = _message(text, allocator, match, text[start : min(end, start + _LONGEST)])
        same = replace(message, line=0)
        before = found.get(same)
        found[same] = message if before is None else replace(before, count=before.count + 1)
    if not found:
        raise not_ours(text, place)
    return tuple(found.values())


def without_tips(text: str) -> str:
    """A text without the settings that out-of-memory messages recommend, so that settings which are on remain."""
    return _TIP.sub(" ", text)


def _message(text: str, allocator: Allocator, match: re.Match[str], raw: str) -> OutOfMemory:
    body = re.sub(r"\s*\n[\s#>|*]*(?:\[rank\d+\]:\s*)?", " ", raw)
    line_start = text.rfind("\n", 0, match.start()) + 1
    rank = _RANK.search(text, line_start, match.start())
    if allocator == "metal":  # it divided by 1024 and wrote GB, before it wrote GiB
        body = re.sub(r"(?<=[0-9] [KMG])B\b", "iB", body)
    values = {name: _first(body, patterns) for name, patterns in _FIELDS.items()}
    unallocated = values.pop("unallocated")
    if values["reserved"] is None and values["allocated"] is not None and unallocated is not None:
        values["reserved"] = values["allocated"] + unallocated
    tip = _TIP.search(body)
    device = _device(allocator, match, body)
    message = OutOfMemory(
        allocator=allocator,
        device=device,
        line=text.count("\n", 0, match.start()) + 1,
        rank=int(rank.group(1) or rank.group(2)) if rank else None,
        source=_source(text[:line_start]),
        others=tuple(
            (int(number), size)
            for number, *parts in re.findall(rf"Process\s+(\d+)\s+has\s+{_SIZE}\s+memory\s+in\s+use", body)
            if (size := _bytes(*parts)) is not None
        ),
        tip=tip.group(1) if tip else None,
        dated=device.startswith("cuda") and re.search(r"total\s+capacity;", body) is not None,
        asked=values["asked"],
        capacity=values["capacity"],
        free=values["free"],
        allowed=values["allowed"],
        allocated=values["allocated"],
        private=values["private"],
        reserved=values["reserved"],
        process=values["process"],
    )
    return _own_process(message)


def _own_process(message: OutOfMemory) -> OutOfMemory:
    """Drop counts that cannot be, and find this process where it hides behind its number outside the container."""
    capacity = message.capacity
    if message.process is not None and capacity is not None and message.process > capacity:
        message = replace(message, process=None)  # drivers that do not tell report -1
    message = replace(message, others=tuple(one for one in message.others if capacity is None or one[1] <= capacity))
    if message.process is not None or message.reserved is None:
        return message
    able = [one for one in message.others if one[1] >= message.reserved]
    if not able:
        return message
    own = min(able, key=lambda one: one[1])
    rest = tuple(one for one in message.others if one is not own)
    return replace(message, process=own[1], inferred=own[0], others=rest)


def _first(body: str, patterns: tuple[str, ...]) -> int | None:
    for pattern in patterns:
        match = re.search(pattern, body)
        if match and (size := _bytes(match.group(1), match.group(2))) is not None:
            return size
    return None


def _bytes(number: str, unit: str) -> int | None:
    try:
        value = float(number.replace(",", "").rstrip("."))
    except ValueError:
        return None
    if unit in _UNITS:
        return round(value * _UNITS[unit])
    return round(value * (_BINARY[unit[0]] if "i" in unit else 1000 ** (1 + "KMGT".index(unit[0]))))


def _device(allocator: Allocator, match: re.Match[str], body: str) -> str:
    named = match.groupdict()
    kind = {"metal": "mps", "host": "cpu", "mindspore": "npu"}.get(allocator, "cuda")
    if allocator == "native":
        kind = named["device"].lower()
    if allocator == "outside" and any(named.values()):
        kind = "npu"
    if allocator in ("metal", "host"):
        return kind
    number = named.get("number") or (found.group(1) if (found := _NUMBER.search(body[:400])) else None)
    return f"{kind}:{number}" if number else kind


def _source(before: str) -> str | None:
    """The user's line that asked, from the traceback above the message."""
    frames = list(_FRAME.finditer(before[-20_000:]))
    own = [frame for frame in frames if not re.search(r"/(?:torch|torch_npu|accelerate)/", frame["file"])]
    if not frames:
        return None
    frame = (own or frames)[-1]
    return f"{frame['file']}:{frame['line']}" + (f" {frame['name']}" if frame["name"] else "")

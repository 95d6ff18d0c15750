"""Failures that are no out-of-memory message of PyTorch, MindSpore or the host: whose they are, and what can help."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from evenload.errors import EvenloadError


@dataclass(frozen=True, kw_only=True, slots=True)
class _Foreign:
    """One kind of failure."""

    words: str
    """Pattern by which it is known."""
    fact: str
    fix: str | None = None


_FOREIGN: Final = (
    _Foreign(
        words=r"OutOfResources: out of resource: shared memory|out of resource: shared memory, Required",
        fact="a Triton kernel asks for more shared memory than a block has: the device's memory is not the matter",
        fix="give the kernel smaller blocks or fewer stages (num_stages)",
    ),
    _Foreign(
        words=r"No available memory for the cache blocks|less than desired GPU memory utilization",
        fact="the server's cache of keys and values found no room beside the weights; no allocation failed",
        fix="lower its share of the device (gpu_memory_utilization), or end what else runs there",
    ),
    _Foreign(
        words=r"RESOURCE_EXHAUSTED|OOM when allocating tensor with shape|XlaRuntimeError",
        fact="this is the message of XLA's or TensorFlow's allocator, which is not read here",
        fix="give a message of PyTorch or MindSpore",
    ),
    _Foreign(
        words=r"ResourceExhaustedError",
        fact="this is the message of another framework's allocator, which is not read here",
        fix="give a message of PyTorch or MindSpore",
    ),
    _Foreign(
        words=r"is killed by signal: Bus error|out of shared memory",
        fact="the workers of a data loader ran out of shared memory (/dev/shm), which is not the device's",
        fix="give the container more (--shm-size), or use fewer workers",
    ),
    _Foreign(
        words=r"is killed by signal: Killed|exitcode: -9\b|\bSIGKILL\b|\bsignal 9\b|(?m:^Killed$)",
        fact="a process was killed from outside, and the text does not say that memory was the reason",
        fix="look for `Killed process` in the kernel's log (dmesg), and give that line: the host may have been full",
    ),
    _Foreign(
        words=r"(?i:out\s+of\s+memory|\boom\b|insufficient memory|failed to allocate)",
        fact="the text speaks of memory, and has no message with numbers that can be read",
        fix="give the whole message, with `Tried to allocate` and what follows, of the rank that failed",
    ),
)
"""The more special ones first."""


def not_ours(text: str, place: str) -> EvenloadError:
    """What to say of a text without a message that can be read; `place` is what the error calls it."""
    for one in _FOREIGN:
        if re.search(one.words, text):
            return EvenloadError(one.fact, where=place, fix=one.fix)
    return EvenloadError(
        "the text holds no out-of-memory message",
        where=place,
        fix="give the lines with `out of memory`, from the traceback or the log of the rank that failed",
    )

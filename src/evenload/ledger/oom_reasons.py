"""Why a device ran out of memory, from the numbers of the message, and what can help.

The order of questions is fixed: could the request ever be met; is it a limit that somebody set; is somebody else in the
way; would the memory that PyTorch holds and does not use have been enough; what else does this process hold; and only
then: the tensors themselves fill the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from evenload.ledger.oom import OutOfMemory
from evenload.ledger.settings import AllocConf
from evenload.units import GIB, human_bytes

Reason = Literal[
    "request too large",
    "limit",
    "other processes",
    "fragmentation",
    "outside PyTorch",
    "free but refused",
    "tensors",
    "not said",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """One thing that can help."""

    text: str
    setting: str | None = None
    """Allocator setting that it recommends, `key:value`."""
    write: str | None = None
    """The environment variable with this setting and everything that is on already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """What a message means."""

    message: OutOfMemory
    reason: Reason
    """The first that holds."""
    facts: tuple[str, ...]
    """What the numbers say, in sentences, the reason first."""
    advice: tuple[Advice, ...]


_NOTICEABLE: Final = 0.05
"""Share of the device below which memory of others is context and rounding."""
_USUAL_OUTSIDE: Final = 2 * GIB
"""Context, cuBLAS and NCCL of an ordinary process stay below; above it something is worth a look."""


def explain(message: OutOfMemory, conf: AllocConf | None = None) -> Explanation:
    """Why there was no room, and what can help.

    Args:
        message: what the message says.
        conf: allocator settings that were on; None: not known. What is on is never advised.
    """
    reason = _reason(message)
    facts = [_FACTS[reason](message)]
    facts += [fact for fact in (_fragmentation_note(message, reason), _tip_note(message, conf)) if fact]
    if message.inferred is not None:
        facts.append(
            f"process {message.inferred} is taken for this one: the message names no other that holds as much as "
            "PyTorch reserved (numbers differ inside containers)"
        )
    return Explanation(message=message, reason=reason, facts=tuple(facts), advice=tuple(_advice(message, reason, conf)))


def _reason(message: OutOfMemory) -> Reason:
    for reason, holds in _RULES.items():
        if holds(message):
            return reason
    return "not said"


def _never_fits(message: OutOfMemory) -> bool:
    limit = message.allowed if message.allowed is not None else message.capacity
    return message.asked is not None and limit is not None and message.asked > limit


def _over_limit(message: OutOfMemory) -> bool:
    """Whether the limit of the process is the cause: with the unused part given back it would still be exceeded."""
    if message.allowed is None or message.asked is None:
        return False
    return (message.allocated or 0) + message.asked > message.allowed or (message.free or 0) >= message.asked


def _freed_others_suffice(message: OutOfMemory) -> bool:
    if message.asked is None or message.capacity is None or message.elsewhere is None:
        return False
    room = message.elsewhere + (message.free or 0) + (message.unallocated or 0)
    return message.elsewhere > _NOTICEABLE * message.capacity and room >= message.asked


def _unused_suffices(message: OutOfMemory) -> bool:
    if message.asked is None or message.unallocated is None:
        return False
    return (message.free or 0) + message.unallocated >= message.asked


def _unused_matters(message: OutOfMemory) -> bool:
    """Whether it is more than the gaps that every allocator has."""
    return message.capacity is None or (message.unallocated or 0) > _NOTICEABLE * message.capacity


def _outside_suffices(message: OutOfMemory) -> bool:
    outside = message.outside if message.outside is not None else message.unexplained
    if message.asked is None or outside is None:
        return False
    return outside > _USUAL_OUTSIDE and (message.free or 0) + outside >= message.asked


_RULES: Final[dict[Reason, Callable[[OutOfMemory], bool]]] = {
    "request too large": _never_fits,
    "limit": _over_limit,
    "free but refused": lambda message: message.asked is not None and (message.free or 0) >= message.asked,
    "other processes": _freed_others_suffice,
    "fragmentation": lambda message: _unused_suffices(message) and _unused_matters(message),
    "outside PyTorch": lambda message: message.allocator == "outside" or _outside_suffices(message),
    "tensors": lambda message: message.allocator == "host" or message.allocated is not None,
}
"""The reasons, in the order in which they are tried."""


def _amount(nbytes: int | None) -> str:
    return "an unknown amount" if nbytes is None else human_bytes(nbytes)


def _too_large(message: OutOfMemory) -> str:
    if message.allowed is not None and message.asked is not None and message.asked > message.allowed:
        whole = f"the {_amount(message.allowed)} that the process is allowed"
    else:
        whole = f"the whole device ({_amount(message.capacity)})"
    return f"one request of {_amount(message.asked)} is larger than {whole}: no setting can meet it"


def _limit(message: OutOfMemory) -> str:
    free = "" if message.free is None else f", although {_amount(message.free)} of the device are free"
    return f"the process is limited to {_amount(message.allowed)} and the request would exceed that{free}"


def _others(message: OutOfMemory) -> str:
    names = ", ".join(f"process {number} {_amount(nbytes)}" for number, nbytes in message.others)
    return (
        f"{_amount(message.elsewhere)} of the device belong to somebody else"
        + (f" ({names})" if names else "")
        + "; with them free the request would have been met"
    )


def _fragmentation(message: OutOfMemory) -> str:
    pools = ""
    if message.private:
        pools = (
            f"; {_amount(message.private)} of its tensors are in private pools (CUDA graphs), whose gaps nothing else "
            "can use"
        )
    return (
        f"PyTorch holds {_amount(message.unallocated)} that no tensor uses, enough for the {_amount(message.asked)} "
        f"asked for, but not in one piece{pools}"
    )


def _outside(message: OutOfMemory) -> str:
    if message.allocator == "outside":
        what = "workspace, HCCL buffers" if _on_npu(message) else "cuBLAS or cuDNN workspace, NCCL buffers"
        return (
            f"a library or the driver asked for memory itself (context, {what}) and "
            "found none: PyTorch's allocator had left too little"
        )
    if message.outside is None:
        return (
            f"{_amount(message.unexplained)} are in use beside PyTorch's allocator: by this process (context, NCCL, "
            "other libraries) or by others, the message does not say"
        )
    return (
        f"this process holds {_amount(message.outside)} beside PyTorch's allocator (context, NCCL buffers, other "
        "libraries)"
    )


def _on_npu(message: OutOfMemory) -> bool:
    return message.device.startswith("npu")


def _refused(message: OutOfMemory) -> str:
    return (
        f"{_amount(message.free)} were free, more than the {_amount(message.asked)} asked for: another process may "
        "have held them for a moment, or the driver could not give them in one piece"
    )


def _tensors(message: OutOfMemory) -> str:
    if message.allocator == "host":
        return "the host is full" if message.asked is None else f"the host has no {_amount(message.asked)} left"
    share = ""
    if message.capacity:
        share = f", {100 * (message.allocated or 0) / message.capacity:.0f} % of the device"
    return f"tensors fill the device: they hold {_amount(message.allocated)}{share}"


def _not_said(message: OutOfMemory) -> str:
    return f"the message does not say what holds the memory of {message.device}"


_FACTS: Final[dict[Reason, Callable[[OutOfMemory], str]]] = {
    "request too large": _too_large,
    "limit": _limit,
    "other processes": _others,
    "fragmentation": _fragmentation,
    "outside PyTorch": _outside,
    "free but refused": _refused,
    "tensors": _tensors,
    "not said": _not_said,
}


def _fragmentation_note(message: OutOfMemory, reason: Reason) -> str | None:
    """What the unused memory of the allocator could have changed, where it is not the reason."""
    if not message.unallocated or message.asked is None or reason in ("fragmentation", "request too large"):
        return None
    if message.unallocated + (message.free or 0) >= message.asked:
        return f"better use of gaps could win {_amount(message.unallocated)} at most"
    return (
        f"fragmentation is not it: PyTorch holds {_amount(message.unallocated)} that no tensor uses, too little "
        f"for {_amount(message.asked)} even in one piece"
    )


def _tip_note(message: OutOfMemory, conf: AllocConf | None) -> str | None:
    if message.tip is None or conf is None:
        return None
    key, _, value = message.tip.partition(":")
    if key in conf.settings and (not value or conf.settings[key] == value):
        return f"the message recommends {message.tip}, which is on already"
    return None


def _advice(message: OutOfMemory, reason: Reason, conf: AllocConf | None) -> list[Advice]:
    advice: list[Advice] = []
    if reason == "request too large":
        advice.append(
            Advice(
                text="find the tensor: its size grows with the product of two dimensions (attention scores, logits, "
                "pairwise masks); use a fused kernel, a chunked loss, or a smaller batch or sequence"
            )
        )
    if reason == "limit":
        advice.append(Advice(text="raise the limit (set_per_process_memory_fraction, per_process_memory_fraction)"))
    if reason == "other processes":
        advice.append(
            Advice(text="end what is left over there (nvidia-smi or npu-smi lists it), or use another device")
        )
    if reason == "outside PyTorch":
        advice += _outside_advice(message)
    if reason == "free but refused":
        advice.append(Advice(text="see whether other processes come and go on the device, and try again without them"))
    if reason == "fragmentation":
        advice += _fragmentation_advice(message, conf)
    if reason in ("tensors", "not said", "fragmentation") and message.allocator != "host":
        advice.append(
            Advice(
                text="see which tensors are there at the peak: `evenload track script.py` and `evenload report`, or "
                "plan the memory with `evenload estimate` and `evenload plan` (recompute, other stage layout)"
            )
        )
    if reason in ("tensors", "other processes") and _unused_suffices(message):
        advice += [one for one in _fragmentation_advice(message, conf) if one.setting]
    if message.allocator == "host":
        advice.append(Advice(text="load less at once, use fewer loader workers, or offload less to the host"))
    return advice


def _outside_advice(message: OutOfMemory) -> list[Advice]:
    advice = [
        Advice(
            text="make communicators and library handles before the tensors (one small collective on every process "
            f"group at the start), and fewer process groups; {'HCCL' if _on_npu(message) else 'NCCL'}_BUFFSIZE makes "
            "their buffers smaller"
        )
    ]
    if message.allocator == "outside":
        advice.append(
            Advice(
                text=f"leave room: torch.{'npu' if _on_npu(message) else 'cuda'}.set_per_process_memory_fraction(0.95)"
                ", or lower the peak of the tensors"
            )
        )
    return advice


def _fragmentation_advice(message: OutOfMemory, conf: AllocConf | None) -> list[Advice]:
    settings = {} if conf is None else dict(conf.settings)
    if message.allocator != "native" or settings.get("backend", "native") != "native":
        return [Advice(text="call torch.cuda.empty_cache() where the shapes of tensors change")]
    if conf is not None and conf.on("expandable_segments"):
        return _beyond_expandable(settings)
    if message.dated and "max_split_size_mb" not in settings:
        why = "keep large segments whole (from PyTorch 2.1 on, expandable_segments:True does more)"
        return [_setting(message, conf, "max_split_size_mb:128", why)]
    clashing = [key for key in ("max_split_size_mb", "garbage_collection_threshold") if key in settings]
    why = "let segments grow instead of leaving gaps"
    why += f"; it takes the place of {' and '.join(clashing)}" if clashing else ""
    return [_setting(message, conf, "expandable_segments:True", why)]


def _beyond_expandable(settings: Mapping[str, str]) -> list[Advice]:
    """What is left when segments can grow already."""
    advice: list[Advice] = []
    if "max_split_size_mb" in settings:
        advice.append(
            Advice(
                text="remove max_split_size_mb: it keeps large free parts of a growing segment from smaller requests"
            )
        )
    advice.append(
        Advice(
            text="segments can grow already, so the gaps are in other pools: every stream and every CUDA graph has its "
            "own; use fewer streams, free the large tensors of one phase before the next, and call "
            "torch.cuda.empty_cache() between them"
        )
    )
    return advice


def _setting(message: OutOfMemory, conf: AllocConf | None, setting: str, why: str) -> Advice:
    """Advice to set something, with the whole text of the variable: a second export would wipe the first."""
    kind = message.device.partition(":")[0]
    key, _, value = setting.partition(":")
    if conf is None:
        variable, text = ("PYTORCH_NPU_ALLOC_CONF" if kind == "npu" else "PYTORCH_CUDA_ALLOC_CONF"), setting
        why += " (unless it is on already: the settings are not known here)"
    else:
        dropped = {"max_split_size_mb", "garbage_collection_threshold"} if key == "expandable_segments" else set[str]()
        kept = {name: one for name, one in conf.settings.items() if name not in dropped}
        variable, text = conf.variable, ",".join(f"{name}:{one}" for name, one in {**kept, key: value}.items())
    return Advice(text=why, setting=setting, write=f'export {variable}="{text}"')

"""What devices can do, and how long an operator takes on them.

Rates are those of the vendors' data sheets, dense (without sparsity); a stated efficiency turns them into what large
kernels reach in practice. Nothing here is fitted to a model: a measured profile is the way to better times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Final, Literal

from evenload.errors import EvenloadError, did_you_mean
from evenload.plan.operators import Operator
from evenload.profile.numbers import count, entry, number, read_data
from evenload.setup import WIDTH, Setup
from evenload.units import parse_bytes

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One kind of device and the links between devices. Rates are per second, in bytes or operations."""

    name: str
    memory: int
    """Bytes of device memory, as the runtime reports them: a little below the size on the label."""
    flops: Mapping[str, float]
    """Peak dense matrix rate by data type."""
    bandwidth: float
    """Device memory."""
    link: float
    """One device to the others of its node, in one direction."""
    network: float
    """One device to another node, in one direction."""
    node: int
    """Devices that share the fast links."""
    matmul_efficiency: float
    """Share of the peak rate that large matrix products reach."""
    memory_efficiency: float = 0.9
    """Share of the memory bandwidth that elementwise kernels reach."""
    link_efficiency: float = 0.8
    """Share of link and network rates that large collectives reach."""
    latency: float = 2e-5
    """Seconds that a collective takes however small it is."""
    source: str = "given by the user"

    def peak(self, dtype: str) -> float:
        """Peak matrix rate for a data type.

        Raises:
            EvenloadError: the device has no such rate.
        """
        if dtype not in self.flops:
            raise EvenloadError(
                f"{self.name} has no {dtype} matrix rate",
                where="$.dtype",
                fix=f"use one of {', '.join(self.flops)}",
            )
        return self.flops[dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks that communicate: `size` of them, `stride` ranks apart (ranks fill nodes in order)."""

    size: int
    stride: int = 1

    def in_node(self, node: int) -> int:
        """Members of the group in one node."""
        return max(1, min(self.size, node // self.stride))


def _rates(*, fp32: float, bf16: float, fp8: float | None = None) -> Mapping[str, float]:
    rates = {"fp32": fp32, "bf16": bf16, "fp16": bf16}
    return MappingProxyType(rates if fp8 is None else {**rates, "fp8": fp8})


_GIB: Final = 2**30
_MATMUL: Final = "matrix efficiency: S. Bekman, Machine Learning Engineering, maximum achievable matmul FLOPS (bf16)"
_MEMORY: Final = "memory size: the device's total in PyTorch's out-of-memory messages"

PRESETS: Final[Mapping[str, Hardware]] = MappingProxyType(
    {
        "a100-40": Hardware(
            name="a100-40",
            memory=round(39.39 * _GIB),
            flops=_rates(fp32=19.5e12, bf16=312e12),
            bandwidth=1.555e12,
            link=300e9,
            network=25e9,
            node=8,
            matmul_efficiency=0.869,
            source=f"NVIDIA A100 40GB SXM data sheet, DGX A100 (200 Gb/s a device); {_MEMORY}; {_MATMUL}",
        ),
        "a100-80": Hardware(
            name="a100-80",
            memory=round(79.14 * _GIB),
            flops=_rates(fp32=19.5e12, bf16=312e12),
            bandwidth=2.039e12,
            link=300e9,
            network=25e9,
            node=8,
            matmul_efficiency=0.869,
            source=f"NVIDIA A100 80GB SXM data sheet, DGX A100 (200 Gb/s a device); {_MEMORY}; {_MATMUL}",
        ),
        "h100": Hardware(
            name="h100",
            memory=round(79.18 * _GIB),
            flops=_rates(fp32=66.9e12, bf16=989.4e12, fp8=1978.9e12),
            bandwidth=3.35e12,
            link=450e9,
            network=50e9,
            node=8,
            matmul_efficiency=0.803,
            source=f"NVIDIA H100 SXM data sheet, DGX H100 (400 Gb/s a device); {_MEMORY}; {_MATMUL}",
        ),
        "h200": Hardware(
            name="h200",
            memory=round(139.81 * _GIB),
            flops=_rates(fp32=66.9e12, bf16=989.4e12, fp8=1978.9e12),
            bandwidth=4.8e12,
            link=450e9,
            network=50e9,
            node=8,
            matmul_efficiency=0.803,
            source=f"NVIDIA H200 SXM data sheet, DGX H200 (400 Gb/s a device); {_MEMORY}; {_MATMUL}, as H100",
        ),
        "b200": Hardware(
            name="b200",
            memory=round(178.35 * _GIB),
            flops=_rates(fp32=80e12, bf16=2250e12, fp8=4500e12),
            bandwidth=8.0e12,
            link=900e9,
            network=50e9,
            node=8,
            matmul_efficiency=0.776,
            source=f"NVIDIA DGX B200 data sheet (400 Gb/s a device); {_MEMORY}; {_MATMUL}",
        ),
        "mi300x": Hardware(
            name="mi300x",
            memory=round(191.69 * _GIB),
            flops=_rates(fp32=163.4e12, bf16=1307.4e12, fp8=2614.9e12),
            bandwidth=5.3e12,
            link=448e9,
            network=50e9,
            node=8,
            matmul_efficiency=0.514,
            source="AMD Instinct MI300X data sheet (7 Infinity Fabric links of 64 GB/s a direction, 400 Gb/s network); "
            f"{_MEMORY}; {_MATMUL}",
        ),
        "ascend-910b": Hardware(
            name="ascend-910b",
            memory=round(60.97 * _GIB),
            flops=_rates(fp32=75e12, bf16=313e12),
            bandwidth=1.6e12,
            link=196e9,
            network=25e9,
            node=8,
            matmul_efficiency=0.8,
            source="Huawei Atlas 800T A2 (2.5 PFLOP/s in fp16 over 8 devices, 7 HCCS links of 28 GB/s a direction, "
            "200 Gb/s network); memory bandwidth: arXiv 2506.12708, one die; fp32 rate and matrix efficiency are "
            "assumed; memory size: the device's total in torch_npu's out-of-memory messages",
        ),
    }
)
"""Known devices. Memory and link efficiency are assumptions: 0.9 is usual for streaming kernels, and 0.8 for large
collectives over NVLink (S. Bekman, Machine Learning Engineering, network chapter)."""

ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "a100": "a100-80",
        "a100-40gb": "a100-40",
        "a100-80gb": "a100-80",
        "a100-sxm4-40gb": "a100-40",
        "a100-sxm4-80gb": "a100-80",
        "h100-80": "h100",
        "h100-80gb": "h100",
        "h100-sxm": "h100",
        "h100-sxm5": "h100",
        "h200-141gb": "h200",
        "h200-sxm": "h200",
        "b200-180gb": "b200",
        "b200-192gb": "b200",
        "mi300": "mi300x",
        "910b": "ascend-910b",
        "ascend910b": "ascend-910b",
        "npu-910b": "ascend-910b",
        "atlas-800t-a2": "ascend-910b",
    }
)
"""Other spellings. Case, blanks and underscores do not matter, nor does a vendor's name in front."""

_VENDORS: Final = ("nvidia-", "amd-", "huawei-", "instinct-")


def find_hardware(name: str) -> Hardware:
    """A device by preset name, by another spelling of it, or from a JSON or YAML file.

    Raises:
        EvenloadError: no such preset or file, or a file with missing or wrong values.
    """
    if name.lower().endswith((".json", ".yaml", ".yml")):
        return read_hardware(read_data(name), where=name)
    return _preset(name, "$.hardware")


def _preset(name: str, where: str) -> Hardware:
    word = "-".join(name.lower().replace("_", " ").replace("-", " ").split())
    for vendor in _VENDORS:
        word = word.removeprefix(vendor)
    key = ALIASES.get(word, word)
    if key in PRESETS:
        return PRESETS[key]
    hint = did_you_mean(word, [*PRESETS, *ALIASES])
    raise EvenloadError(
        f"the hardware {name!r} is not known",
        where=where,
        fix=f"{hint + ' or ' if hint else ''}use one of {', '.join(PRESETS)}, or the path of a JSON or YAML file",
    )


def read_hardware(data: object, where: str | None = None) -> Hardware:
    """A device from parsed JSON or YAML: the fields of `Hardware`, or `like: PRESET` and the fields that differ.

    Raises:
        EvenloadError: with the path of the value that is missing, unknown or wrong.
    """
    try:
        return _read(entry(data, "$"))
    except EvenloadError as error:
        raise (error if where is None else error.at(f"{where}: {error.where or '$'}")) from None


def _read(item: dict[str, Any]) -> Hardware:
    known = {field.name for field in fields(Hardware)} | {"like"}
    for key in item:
        if key not in known:
            raise EvenloadError(f"unknown key {key!r}", where=f"$.{key}", fix=did_you_mean(key, sorted(known)))
    base = _preset(str(item["like"]), "$.like") if "like" in item else None
    given: dict[str, Any] = {name: getattr(base, name) for name in known - {"like"}} if base else {}
    for name in ("bandwidth", "link", "network"):
        given[name] = _positive(item, name, given.get(name))
    for name, usual in (("matmul_efficiency", None), ("memory_efficiency", 0.9), ("link_efficiency", 0.8)):
        given[name] = _positive(item, name, given.get(name, usual), most=1.0)
    given["latency"] = number(item, ["latency"], "$", default=given.get("latency", 2e-5), most=1.0)
    given["node"] = count(item, ["node"], "$", default=given.get("node"), most=2**20)
    if given["node"] < 1:
        raise EvenloadError("node is 0", where="$.node", fix="give the number of devices that share the fast links")
    if "memory" in item:
        given["memory"] = _memory(item["memory"])
    if "flops" in item:
        given["flops"] = _flops(item["flops"])
    for name in ("memory", "flops"):
        if name not in given:
            raise EvenloadError(f"{name!r} is missing", where="$", fix=f"add {name!r}, or 'like' and a preset")
    given["name"] = str(item.get("name", given.get("name", "given")))
    given["source"] = str(item.get("source", "given by the user"))
    return Hardware(**given)


def _positive(item: Mapping[str, Any], name: str, default: float | None, most: float = 1e18) -> float:
    value = number(item, [name], "$", default=default, most=most)
    if value <= 0:
        raise EvenloadError(f"{name} is 0", where=f"$.{name}", fix="give a number above 0")
    return value


def _memory(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise EvenloadError(f"memory should be a size, not {value!r}", where="$.memory", fix="write it as 80GiB")
    return parse_bytes(value, where="$.memory")


def _flops(value: object) -> Mapping[str, float]:
    rates = entry(value, "$.flops")
    for dtype in rates:
        if dtype not in WIDTH:
            raise EvenloadError(f"unknown data type {dtype!r}", where=f"$.flops.{dtype}", fix=f"use {', '.join(WIDTH)}")
        if number(rates, [dtype], "$.flops") <= 0:
            raise EvenloadError(f"the rate of {dtype} is 0", where=f"$.flops.{dtype}")
    return MappingProxyType({dtype: float(rate) for dtype, rate in rates.items()})


def sent_bytes(kind: Collective, nbytes: float, size: int) -> float:
    """Bytes that each of `size` ranks sends in a ring collective over a tensor of `nbytes` when whole.

    all_gather, reduce_scatter and all_to_all send `(n - 1) / n` of it, all_reduce twice that.
    Source: NVIDIA nccl-tests, `doc/PERFORMANCE.md`.
    """
    share = (size - 1) / size * nbytes
    return 2 * share if kind == "all_reduce" else share


def collective_time(kind: Collective, sent: float, group: Group, hardware: Hardware) -> float:
    """Seconds of a collective in which each rank sends `sent` bytes.

    A ring inside a node runs at the link's rate. A group that spans nodes has one ring per member in a node, so each
    rank gets that many network ports, up to the link's rate. In all_to_all the bytes for other nodes leave through the
    rank's own port while those for its own node use the links.
    """
    if group.size == 1 or sent == 0:
        return 0.0
    link, network = (rate * hardware.link_efficiency for rate in (hardware.link, hardware.network))
    near = group.in_node(hardware.node)
    if near == group.size:
        return hardware.latency + sent / link
    if kind == "all_to_all":
        inside = sent * (near - 1) / (group.size - 1)
        return hardware.latency + max(inside / link, (sent - inside) / network)
    return hardware.latency + sent / min(link, near * network)


def tensor_group(setup: Setup) -> Group:
    """Tensor-parallel ranks are neighbours."""
    return Group(size=setup.tp)


def context_group(setup: Setup) -> Group:
    """Ranks that divide a sequence lie over the tensor ranks."""
    return Group(size=setup.cp, stride=setup.tp)


def expert_group(setup: Setup) -> Group:
    """Expert-parallel ranks lie over tensor, context and data ranks, after the split inside an expert."""
    return Group(size=setup.ep, stride=setup.expert_tp)


def data_group(setup: Setup) -> Group:
    """Ranks that hold the same parameters: data and context parallel."""
    return Group(size=setup.dp * setup.cp, stride=setup.tp)


def operator_time(operator: Operator, hardware: Hardware, setup: Setup) -> float:
    """Seconds of one forward call of an operator: the slower of computing and moving, then its collective.

    Source: S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 52(4), 2009.
    """
    compute = operator.flops / (hardware.peak(setup.dtype) * hardware.matmul_efficiency)
    memory = operator.moved / (hardware.bandwidth * hardware.memory_efficiency)
    return max(compute, memory) + communication_time(operator, hardware, setup)


def communication_time(operator: Operator, hardware: Hardware, setup: Setup) -> float:
    """Seconds of an operator's collective, 0 without one."""
    if operator.comm is None:
        return 0.0
    groups = {"tensor": tensor_group, "expert": expert_group, "context": context_group}
    among = groups["expert" if operator.comm == "all_to_all" else operator.group](setup)
    return collective_time(operator.comm, operator.comm_bytes, among, hardware)


def transfer_time(nbytes: float, hardware: Hardware, setup: Setup) -> float:
    """Seconds to send `nbytes` from a rank of one stage to its partner in the next, on the slowest boundary."""
    if setup.pp == 1 or nbytes == 0:
        return 0.0
    rate = hardware.link if setup.devices <= hardware.node else hardware.network
    return hardware.latency + nbytes / (rate * hardware.link_efficiency)

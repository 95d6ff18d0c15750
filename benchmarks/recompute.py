"""What recomputation frees and what it costs: `python benchmarks/recompute.py [--json] [--rounds N] [--device cuda]`.

Blocks of Hugging Face Llama models of several sizes, forward and backward: without recomputation, with the engine
under four policies, and with what PyTorch offers. All methods run in turn in every round, so that a busy machine is
busy for all; a ratio is the median over the rounds of method / none in the same round. Bytes are the allocator's:
*kept* is what forward leaves for backward, *peak* the highest point of a step, parameters and gradients left out.

Times are those of the process on a CPU, with one thread, and of CUDA events on a GPU. The last table is what Python
itself costs, on tensors so small that there is nothing to compute.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import evenload.recompute
from evenload.plan.policy import LayerPolicy

DEFAULT = (r"mlp\.mul", r"mlp\.act_fn\.silu")
NORMS = (".*norm",)
EVERYTHING = (".*",)
PRODUCTS = (r".*\..*\.matmul", r"self_attn\.flash_attention")
"""What "everything but matmul/attention" leaves out."""

MOST_DEFAULT = 1.10
"""What a step with the default pair may cost, in plain steps."""
MOST_OVERHEAD = 5.0
"""Microseconds of Python for every tensor that autograd saves."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Blocks of one size."""

    layers: int
    batch: int
    seq: int
    hidden: int
    intermediate: int
    heads: int
    dtype: str
    autocast: bool = False

    @property
    def name(self) -> str:
        """How the tables call it."""
        kind = f"{self.dtype}, autocast bf16" if self.autocast else self.dtype
        return f"{self.layers} blocks, {self.batch} x {self.seq} tokens, hidden {self.hidden}, {kind}"


CASES = (
    Case(layers=8, batch=2, seq=256, hidden=256, intermediate=704, heads=4, dtype="fp32"),
    Case(layers=8, batch=2, seq=256, hidden=256, intermediate=704, heads=4, dtype="bf16"),
    Case(layers=8, batch=2, seq=256, hidden=256, intermediate=704, heads=4, dtype="fp32", autocast=True),
    Case(layers=4, batch=1, seq=512, hidden=512, intermediate=1376, heads=8, dtype="fp32"),
    Case(layers=4, batch=1, seq=512, hidden=1024, intermediate=2816, heads=16, dtype="fp32"),
)
GPU_CASES = (
    Case(layers=8, batch=1, seq=2048, hidden=2048, intermediate=5632, heads=16, dtype="bf16"),
    Case(layers=8, batch=1, seq=4096, hidden=4096, intermediate=14336, heads=32, dtype="bf16"),
    Case(layers=8, batch=2, seq=2048, hidden=2048, intermediate=5632, heads=16, dtype="fp32", autocast=True),
)


class Blocks(torch.nn.Module):
    """The blocks, and how each is called: a method of recomputation may stand between."""

    def __init__(self, case: Case, device: str) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=case.hidden,
            intermediate_size=case.intermediate,
            num_attention_heads=case.heads,
            num_key_value_heads=case.heads,
            attn_implementation="sdpa",
        )
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[case.dtype]
        self.layers = torch.nn.ModuleList(LlamaDecoderLayer(config, at) for at in range(case.layers))
        self.to(device=device, dtype=kind)
        self.source = torch.randn(case.batch, case.seq, case.hidden, device=device, dtype=kind, requires_grad=True)
        self.positions = LlamaRotaryEmbedding(config).to(device)(
            self.source, torch.arange(case.seq, device=device)[None]
        )
        self.autocast = torch.autocast(device, torch.bfloat16, enabled=case.autocast)
        self.call: Callable[..., torch.Tensor] = lambda layer, state: layer(state, position_embeddings=self.positions)
        for parameter in (self.source, *self.parameters()):
            parameter.grad = torch.zeros_like(parameter)

    def forward(self) -> torch.Tensor:
        """The loss."""
        with self.autocast:
            state = self.source * 1
            for layer in self.layers:
                state = self.call(layer, state)
        return state.float().square().mean()

    def step(self) -> None:
        """Forward and backward, adding to gradients that are there."""
        self.forward().backward()


# ---- methods ----


@contextmanager
def none(_: Blocks) -> Iterator[None]:
    """No recomputation."""
    yield


@contextmanager
def engine(blocks: Blocks, **policy: Any) -> Iterator[None]:
    """This library."""
    with evenload.recompute.apply(blocks, **policy):
        yield


@contextmanager
def called(blocks: Blocks, call: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Blocks that are called in another way."""
    before, blocks.call = blocks.call, call
    yield
    blocks.call = before


def full_checkpoint(blocks: Blocks) -> Any:
    """`torch.utils.checkpoint` of every block."""

    def call(layer: torch.nn.Module, state: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, state, position_embeddings=blocks.positions, use_reentrant=False)

    return called(blocks, call)


def selective_checkpoint(blocks: Blocks) -> Any:
    """Torch's selective checkpoint in its good form: matrix products and attention are saved, the rest runs again."""
    aten = torch.ops.aten
    names = ("mm", "addmm", "bmm", "_scaled_dot_product_flash_attention_for_cpu")
    names += ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention")
    names += ("_scaled_dot_product_cudnn_attention",)
    saved = [getattr(aten, name).default for name in names if hasattr(aten, name)]
    contexts = partial(create_selective_checkpoint_contexts, saved)

    def call(layer: torch.nn.Module, state: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, state, position_embeddings=blocks.positions, use_reentrant=False, context_fn=contexts)

    return called(blocks, call)


@contextmanager
def torch_remat(blocks: Blocks) -> Iterator[None]:
    """Meta's `torch-remat`, where installed: projections and attention are saved, the rest runs again."""
    import torch_remat as remat

    def saved(run: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = remat.region(run, name, recompute=False)(*args, **kwargs)
            remat.recompute_needs_tensor(result)
            return result

        return call

    functional = torch.nn.functional
    attention = functional.scaled_dot_product_attention
    linears = [(f"linear{at}", one) for at, one in enumerate(blocks.modules()) if isinstance(one, torch.nn.Linear)]

    def call(layer: torch.nn.Module, state: torch.Tensor) -> torch.Tensor:
        run = partial(layer, position_embeddings=blocks.positions)
        return remat.checkpoint(region_name="layer")(run)(state)

    with ExitStack() as stack:
        for name, one in linears:
            one.forward = saved(one.forward, name)
            stack.callback(one.__dict__.pop, "forward")
        functional.scaled_dot_product_attention = saved(attention, "attention")
        stack.callback(setattr, functional, "scaled_dot_product_attention", attention)
        stack.enter_context(called(blocks, call))
        yield


METHODS: dict[str, Callable[[Blocks], Any]] = {
    "none": none,
    "engine, default pair": partial(engine, select=DEFAULT),
    "engine, norms": partial(engine, select=NORMS),
    "engine, everything but matmul/attention": partial(engine, select=EVERYTHING, exclude=PRODUCTS),
    "engine, whole layers": partial(engine, policy=LayerPolicy(full=True), whole="engine"),
    "torch SAC, saves matmul and attention": selective_checkpoint,
    "torch full checkpoint": full_checkpoint,
    "torch-remat, saves matmul and attention": torch_remat,
}


# ---- measuring ----


def memory(run: Callable[[], Any], device: str) -> tuple[int, int, Any]:
    """(bytes left afterwards, highest point, result)."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = run()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before, result
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    events = [one for one in profiler.profiler.kineto_results.events() if one.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return level, peak, result


def seconds(run: Callable[[], Any], device: str) -> float:
    """Time of one step."""
    if device == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000
    before = time.process_time()
    run()
    return time.process_time() - before


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method on one case."""

    method: str
    kept: int
    peak: int
    ratio: float
    """Step time, in steps without recomputation."""
    low: float
    high: float
    """Quartiles of the ratio."""
    same: bool
    """Gradients are equal to the bit."""


def measure(case: Case, device: str, rounds: int) -> list[Row]:
    """Every method on one case."""
    torch.manual_seed(0)
    blocks = Blocks(case, device)
    methods = {name: method for name, method in METHODS.items() if available(name, method, blocks)}
    bytes_of: dict[str, tuple[int, int]] = {}
    gradients: dict[str, list[torch.Tensor]] = {}
    times: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(rounds + 1):
        for name, method in methods.items():
            with method(blocks):
                blocks.step()  # records, and warms up
                if turn == 0:
                    blocks.step()
                    gradients[name] = fresh_gradients(blocks)
                    kept, _, loss = memory(blocks.forward, device)
                    del loss
                    bytes_of[name] = kept, memory(blocks.step, device)[1]
                else:
                    gc.collect()
                    times[name].append(min(seconds(blocks.step, device) for _ in range(3)))
    return [row(name, bytes_of[name], times, gradients) for name in methods]


def available(name: str, method: Callable[[Blocks], Any], blocks: Blocks) -> bool:
    """Whether a method that is no part of PyTorch is installed."""
    try:
        with method(blocks):
            return True
    except ImportError:
        print(f"left out: {name} (not installed)", file=sys.stderr)
        return False


def fresh_gradients(blocks: Blocks) -> list[torch.Tensor]:
    """Gradients of one step alone."""
    for parameter in blocks.parameters():
        parameter.grad.zero_()
    blocks.step()
    return [parameter.grad.clone() for parameter in blocks.parameters()]


def row(
    name: str, nbytes: tuple[int, int], times: dict[str, list[float]], gradients: dict[str, list[torch.Tensor]]
) -> Row:
    """The figures of one method."""
    ratios = [mine / plain for mine, plain in zip(times[name], times["none"], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Row(
        method=name,
        kept=nbytes[0],
        peak=nbytes[1],
        ratio=statistics.median(ratios),
        low=quartiles[0],
        high=quartiles[2],
        same=all(map(torch.equal, gradients[name], gradients["none"])),
    )


def overhead(device: str, rounds: int) -> dict[str, float]:
    """Python's own cost of following a plan: microseconds a saved tensor, and of one forward of one block."""
    tiny = Case(layers=1, batch=1, seq=4, hidden=16, intermediate=32, heads=2, dtype="fp32")
    blocks = Blocks(tiny, device)
    layer, source = blocks.layers[0], blocks.source

    def forward() -> Any:
        return layer(source, position_embeddings=blocks.positions)

    def best(count: int = 200) -> float:
        taken = []
        for _ in range(count):
            start = time.perf_counter()
            result = forward()
            taken.append(time.perf_counter() - start)
            del result
        return statistics.quantiles(taken, n=10)[0] * 1e6

    rows = []
    for _ in range(max(rounds, 5)):
        plain = best()
        with evenload.recompute.apply(blocks, select=DEFAULT) as handle:
            forward()
            hooked = best()
            (saved,) = handle.saved_tensors().values()
        rows.append((plain, hooked, (hooked - plain) / saved))
    middle = sorted(rows, key=lambda one: one[2])[len(rows) // 2]
    return {"plain_us": middle[0], "hooked_us": middle[1], "us_per_saved_tensor": middle[2]}


def verdicts(tables: dict[str, list[Row]], cost: dict[str, float]) -> dict[str, bool]:
    """What this library claims, and whether it held here."""
    rows = {case: {one.method: one for one in table} for case, table in tables.items()}
    big, sac = "engine, everything but matmul/attention", "torch SAC, saves matmul and attention"
    each = list(rows.values())
    cheap = "engine, default pair"
    return {
        "gradients are equal to the bit": all(one.same for table in tables.values() for one in table),
        "everything but matmul/attention keeps no more than SAC": all(one[big].kept <= one[sac].kept for one in each),
        "everything but matmul/attention is faster than SAC": all(one[big].ratio < one[sac].ratio for one in each),
        f"the default pair costs at most {MOST_DEFAULT:.2f}": all(one[cheap].ratio <= MOST_DEFAULT for one in each),
        f"Python costs at most {MOST_OVERHEAD} us a saved tensor": cost["us_per_saved_tensor"] <= MOST_OVERHEAD,
    }


def show(tables: dict[str, list[Row]], cost: dict[str, float], held: dict[str, bool]) -> None:
    """The tables, as the README has them."""
    for case, table in tables.items():
        print(f"\n{case}\n")
        print("| method | kept MiB | peak MiB | step time | quartiles | gradients |")
        print("|---|---:|---:|---:|---:|---|")
        for one in table:
            same = "same" if one.same else "DIFFERENT"
            print(
                f"| {one.method} | {one.kept / 2**20:.2f} | {one.peak / 2**20:.2f} | {one.ratio:.2f} | "
                f"{one.low:.2f}-{one.high:.2f} | {same} |"
            )
    print(
        f"\nPython: {cost['plain_us']:.0f} us a block's forward, {cost['hooked_us']:.0f} us followed, "
        f"{cost['us_per_saved_tensor']:.1f} us a saved tensor\n"
    )
    for claim, true in held.items():
        print(f"{'yes' if true else 'NO '}  {claim}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--case", type=int, help="number of one case only")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = GPU_CASES if options.device == "cuda" else CASES
    chosen = cases if options.case is None else cases[options.case : options.case + 1]
    tables = {case.name: measure(case, options.device, options.rounds) for case in chosen}
    cost = overhead(options.device, options.rounds)
    held = verdicts(tables, cost)
    if options.json:
        rows = {case: [asdict(one) for one in table] for case, table in tables.items()}
        print(json.dumps({"cases": rows, "python": cost, "held": held}, indent=2))
    else:
        show(tables, cost, held)
    sys.exit(0 if all(held.values()) else 1)


if __name__ == "__main__":
    main()

"""What one layer costs under a recompute policy: times and memory events, from its operator graph.

Times, in terms of the time of a forward call:

- a matrix product (`heavy`) runs backward as one product of the same size for each operand that needs a gradient:
  twice the forward with a weight and an input (d(AB) = dA B + A dB);
- fused attention runs backward in 2.5 times the forward: five matrix products instead of two
  (T. Dao, FlashAttention-2, arXiv 2307.08691, section 4);
- a collective has a collective of the same volume as its backward: gather and reduce-scatter are each other's, as are
  all_to_all and itself; an all_reduce stands for the one that tensor parallelism runs in backward at the other end of
  the same region (arXiv 1909.08053, section 3);
- everything else is timed by the bytes its backward moves: gradients of the results and saved values read, gradients
  of the inputs and of the weights written; where a value is read by several operators, its gradients are added up;
- what recomputation runs again takes its forward time again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import fsum

from evenload.errors import EvenloadError
from evenload.plan.mincut import Decision, decide
from evenload.plan.operators import Graph, Operator
from evenload.plan.policy import LayerPolicy
from evenload.profile.liveness import backward_events, forward_events, needs_gradient, shares_gradient
from evenload.profile.profile import Cost, Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class Births:
    """What the first backward of a step does with the gradients of weights."""

    gradients: float
    """Bytes of the layer's accumulated gradients, which come to be one by one with those of its weights."""
    weight_gradients: float
    """As `weight_gradients` of `graph_cost`: 0 where the gradient of a weight becomes the accumulated one."""

    def share(self, graph: Graph) -> float:
        """Bytes of accumulated gradients for every byte of a weight."""
        weights = sum(operator.weight_bytes for operator in graph.operators)
        return self.gradients / weights if weights else 0.0


OperatorTime = Callable[[Operator], float]
"""Seconds of one forward call of an operator."""
ATTENTION_BACKWARD = 2.5
"""Backward of fused attention, in forwards."""


def graph_cost(
    graph: Graph,
    policy: LayerPolicy,
    times: OperatorTime,
    *,
    mp_comm: bool = True,
    sliced: int = 1,
    weight_gradients: float = 1.0,
    births: Births | None = None,
) -> Cost:
    """Times and memory of one layer for one micro-batch under a policy.

    The memory events follow the rules of `evenload.profile.liveness`; see there who counts the values between layers.

    Args:
        graph: the layer on one rank.
        policy: what is recomputed.
        times: time of a forward call of an operator; also asked about operators that only move bytes.
        mp_comm: full recompute runs collectives again; if False their results are kept where they are needed.
        sliced: full recompute keeps 1/`sliced` of the layer's input and gathers the rest from the tensor-parallel
            ranks in backward; 1: keeps all of it.
        weight_gradients: bytes of a weight's gradient while backward makes it, for every byte of the weight:
            0 where the kernel adds straight into the gradients that the rank holds.
        births: what differs in the first backward of a step; None: nothing, gradients are there all the time.

    Raises:
        EvenloadError: a pattern of the policy cannot be read, or an argument is out of range.
    """
    if sliced < 1:
        raise EvenloadError(f"sliced is {sliced}", where="$.sliced", fix="give the tensor-parallel degree, or 1")
    if not weight_gradients >= 0:
        raise EvenloadError(f"weight_gradients is {weight_gradients}", where="$.weight_gradients", fix="give 0 or more")
    decision = decide(graph, policy, mp_comm=mp_comm)
    share = 1 / sliced if policy.full else 1.0
    recompute = recompute_time(graph, decision, times) + _gather_time(graph, share, times)

    def backward(weight_gradients: float, born: float) -> Segment:
        return Segment(
            events=backward_events(
                graph,
                decision,
                full=policy.full,
                weight_gradients=weight_gradients,
                input_share=share,
                born=born,
            )
        )

    return Cost(
        forward_time=fsum(map(times, graph.operators)),
        backward_time=fsum(backward_time(graph, operator, times) for operator in graph.operators)
        + _accumulation_time(graph, times)
        + recompute,
        recompute_time=recompute,
        forward=Segment(events=forward_events(graph, decision.kept, input_share=share)),
        backward=backward(weight_gradients, 0.0),
        first_backward=None if births is None else backward(births.weight_gradients, births.share(graph)),
    )


def recompute_time(graph: Graph, decision: Decision, times: OperatorTime) -> float:
    """Time of the operators that run again."""
    return fsum(times(graph.operators[i]) for i in decision.rerun)


def backward_time(graph: Graph, operator: Operator, times: OperatorTime) -> float:
    """Time of one operator's backward, by the rules of this module; 0 where nothing needs a gradient."""
    inputs = [name for name in operator.inputs if needs_gradient(graph, name)]
    results = [name for name in operator.outputs if needs_gradient(graph, name)]
    operands = len(inputs) + (operator.weight_bytes > 0)
    if not operands or not results:
        return 0.0
    if operator.comm:
        return times(operator)
    if operator.heavy:
        fused = "_attention" in (operator.aten or operator.name)
        return times(operator) * (ATTENTION_BACKWARD if fused else operands)
    written = [name for name in inputs if not shares_gradient(graph, operator, name)]
    if not written and not operator.weight_bytes:
        return 0.0  # the gradient is passed on as it is
    moved = sum(map(graph.nbytes, (*results, *operator.saves))) + operator.weight_bytes
    moved += sum(operator.reads(graph.by_name[name]) for name in written)
    return times(_mover(f"{operator.name}_backward", moved, operator.path))


def _accumulation_time(graph: Graph, times: OperatorTime) -> float:
    """Time to add up the gradients of values that several operators read: two read, one written for every addition.

    Gradients of parts of a value are joined first: all parts read, the whole written.
    """
    whole: Counter[str] = Counter()
    in_parts: set[str] = set()
    for operator in graph.operators:
        if not any(needs_gradient(graph, result) for result in operator.outputs):
            continue
        for name in operator.inputs:
            if not needs_gradient(graph, name):
                continue
            if operator.reads(graph.by_name[name]) < graph.nbytes(name):
                in_parts.add(name)
            else:
                whole[name] += 1
    whole.update(in_parts)
    moved = [3 * graph.nbytes(name) * (count - 1) for name, count in whole.items()]
    moved += [2 * graph.nbytes(name) for name in in_parts]
    return fsum(times(_mover("add", nbytes)) for nbytes in moved if nbytes)


def _gather_time(graph: Graph, share: float, times: OperatorTime) -> float:
    """Time to gather the part of the input that other ranks keep."""
    missing = graph.nbytes(graph.input) * (1 - share)
    if not missing:
        return 0.0
    return times(Operator(path="", name="all_gather", comm="all_gather", comm_bytes=missing))


def _mover(name: str, moved: float, path: str = "") -> Operator:
    """An operator that only moves bytes."""
    return Operator(path=path, name=name, moved=float(moved))

"""A measured profile, made by hand: two kinds of layers, one operator each."""

from evenload.plan.operators import Graph, Operator, Value
from evenload.plan.policy import LayerPolicy
from evenload.profile.measured import Conditions, KindTimes, Measured, Spread, Timed, digest_of
from evenload.profile.profile import Segment
from evenload.profile.traced import FIRST, LAST, Held, LayerMemory, StepMemory, TracedModel
from evenload.setup import Setup

SETUP = Setup(micro_batch=2, seq=64, dtype="fp32")
CONFIG = {"model_type": "llama", "hidden_size": 16}


def spread(seconds):
    return Spread(median=seconds, low=0.9 * seconds, high=1.1 * seconds)


def timed(policy, forward, backward):
    return Timed(policy=policy, forward=spread(forward), backward=spread(backward))


def graph(name):
    """A linear layer, whose result an activation keeps."""
    return Graph(
        values=(
            Value(name="x", nbytes=100),
            Value(name="w", nbytes=40, held=True),
            Value(name="h", nbytes=100),
            Value(name="y", nbytes=100),
        ),
        operators=(
            Operator(
                path="up", name="linear", inputs=("x", "w"), outputs=("h",), saves=("x", "w"), flops=1e6, heavy=True
            ),
            Operator(path=name, name="silu", inputs=("h",), outputs=("y",), saves=("h",), moved=1e6),
        ),
        input="x",
        output="y",
    )


def measured(**changes):
    kinds = (FIRST, "Block", "Wide", LAST)
    traced = TracedModel(
        name="tiny",
        path="model.layers",
        kinds=("Block", "Wide", "Block"),
        graphs={kind: graph("act") for kind in kinds},
        memory={
            kind: LayerMemory(
                forward=Segment(events=(300.0, -100.0)),
                backward=Segment(events=(50.0, -250.0)),
                first_backward=Segment(events=(50.0, 40.0, -250.0)),
            )
            for kind in kinds
        },
        held={kind: Held(count=10, parameters=40, gradients=40, optimizer=80) for kind in kinds},
        tied=Held(),
        step=StepMemory(resident=8, optimizer_transient=0, optimizer_loops=True, recomputes=False, accumulates=True),
        boundary=100,
        dtype="fp32",
        device="cpu",
    )
    ends = KindTimes(runs=(timed(LayerPolicy(), 0.002, 0.004),), update=spread(0.001))
    block = KindTimes(
        runs=(timed(LayerPolicy(), 0.010, 0.020), timed(LayerPolicy(full=True), 0.010, 0.031)), update=spread(0.003)
    )
    values = {
        "model": "tiny",
        "digest": digest_of(CONFIG),
        "setup": SETUP,
        "conditions": Conditions(
            device="cpu", hardware="a processor", torch="2.13.0", threads=1, processes=2, rounds=20, code="reference"
        ),
        "traced": traced,
        "times": {FIRST: ends, "Block": block, "Wide": block, LAST: ends},
        "chunk": timed(LayerPolicy(), 0.0005, 0.0001),
        "transfer": spread(0.0002),
    }
    return Measured(**{**values, **changes})

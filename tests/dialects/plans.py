"""Random plans for the properties of every dialect."""

from hypothesis import strategies as st

from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy, first_layers
from evenload.setup import Setup

patterns = st.sampled_from(
    [
        r"feed_forward\.mul",
        r"feed_forward\.w1\.activation\.silu",
        r".*\.norm",
        r"mlp\.act_fn",
        r"feed_forward\.w3\.matmul",
    ]
)


@st.composite
def layouts(draw, *, max_pp=6, max_interleave=3, least=0):
    pp = draw(st.integers(1, max_pp))
    interleave = draw(st.integers(1, max_interleave))
    row = st.lists(st.integers(least, 5), min_size=pp, max_size=pp).map(tuple)
    table = tuple(draw(row) for _ in range(interleave))
    return Layout(table) if sum(map(sum, table)) else Layout(((1,) * pp, *table[1:]))


@st.composite
def setups(draw, layout):
    return Setup(
        pp=layout.pp,
        interleave=layout.interleave,
        tp=draw(st.sampled_from([1, 2, 8])),
        sequence_parallel=draw(st.booleans()),
        cp=draw(st.sampled_from([1, 2])),
        dp=draw(st.integers(1, 64)),
        etp=draw(st.sampled_from([None, 1, 2])),
        zero=draw(st.sampled_from([0, 1, 2, 3])),
        micro_batch=draw(st.integers(1, 4)),
        micro_batches=draw(st.integers(1, 512)),
        seq=draw(st.sampled_from([2048, 8192])),
        dtype=draw(st.sampled_from(["bf16", "fp16", "fp32"])),
        grad_dtype=draw(st.sampled_from([None, "fp32"])),
        master_weights=draw(st.booleans()),
        schedule=draw(st.sampled_from(["1f1b", "gpipe"])) if layout.interleave == 1 else "interleaved_1f1b",
    )


@st.composite
def plans(draw, *, names=patterns):
    """Any plan: any sets of layers behind any patterns."""
    layout = draw(layouts())
    layers = st.frozensets(st.integers(0, layout.num_layers - 1))
    switches = st.dictionaries(names, layers, max_size=3)
    policy = Policy(
        full=draw(layers),
        select=draw(switches),
        comm=draw(switches),
        select_exclude=draw(switches),
        comm_exclude=draw(switches),
        optimizer_comm=draw(st.booleans()),
        mp_comm=draw(st.booleans()),
        slice_activation=draw(st.booleans()),
    )
    return Plan(setup=draw(setups(layout)), layout=layout, policy=policy, model=draw(st.none() | st.text(max_size=20)))


@st.composite
def first_layer_plans(draw, *, names=patterns):
    """Plans whose switches are all "the first n layers of each chunk", as tables of counts can say."""
    layout = draw(layouts())

    def layers():
        table = tuple(tuple(draw(st.integers(0, most)) for most in row) for row in layout.table)
        return first_layers(table, layout)

    policy = Policy(
        full=layers(),
        select={name: layers() for name in draw(st.lists(names, unique=True, max_size=3))},
        comm={name: layers() for name in draw(st.lists(names, unique=True, max_size=2))},
        optimizer_comm=draw(st.booleans()),
        mp_comm=draw(st.booleans()),
        slice_activation=draw(st.booleans()),
    )
    return Plan(setup=draw(setups(layout)), layout=layout, policy=policy)

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.graphs import HIDDEN, ROW, WIDE, Builder, llama
from tests.plan.random_layers import layers

from evenload import EvenloadError
from evenload.plan.mincut import Decision, collectives, cut, decide
from evenload.plan.operators import Graph, Operator, Value
from evenload.plan.patterns import match
from evenload.plan.policy import DEFAULT_COMM, DEFAULT_SELECT, LayerPolicy, Recompute
from evenload.units import MIB


def select(graph: Graph, *patterns: str) -> Decision:
    return decide(graph, LayerPolicy(select=patterns))


def rerun(graph: Graph, decision: Decision) -> list[str]:
    return [graph.operators[i].label for i in decision.rerun]


# ---- the layer whose real counterpart was traced ----


def test_no_recomputation_keeps_what_the_graph_keeps():
    graph = llama()
    decision = decide(graph, LayerPolicy())
    assert (decision.kept, decision.freed, decision.rerun) == (graph.kept(), 0, ())


def test_the_default_pair_frees_22_mib_and_re_runs_two_operators():
    graph = llama()
    decision = decide(graph, LayerPolicy.of(Recompute.SELECT))
    assert decision.freed == 22 * MIB
    assert decision.dropped == ("mlp.act_fn.silu", "mlp.mul")
    assert rerun(graph, decision) == ["mlp.act_fn.silu", "mlp.mul"]
    assert (decision.extra, decision.declined) == ((), ())
    assert decision.kept_bytes == graph.kept_bytes - 22 * MIB


def test_norms_free_what_they_keep_less_the_values_they_start_from():
    decision = select(llama(), r".*\.norm")
    assert decision.extra == ("x", "middle")
    assert decision.freed == 2 * (2 * HIDDEN + ROW + 2 * HIDDEN) - 2 * HIDDEN


def test_full_recompute_keeps_the_input_alone():
    graph = llama()
    decision = decide(graph, LayerPolicy(full=True))
    assert decision.kept == ("x",)
    assert decision.kept_bytes == HIDDEN
    assert set(decision.dropped) == set(graph.kept())


def test_full_recompute_stops_after_the_last_value_that_backward_needs():
    graph = llama()
    labels = rerun(graph, decide(graph, LayerPolicy(full=True)))
    assert labels[-1] == "mlp.mul"  # neither the down projection nor the last addition
    assert len(labels) == len(graph.operators) - 2


def test_all_of_a_module_by_name_re_runs_its_matrix_products_too():
    graph = llama()
    decision = select(graph, "feed_forward")
    assert decision.freed == 4 * WIDE
    assert "mlp.gate_proj.linear.mm" in rerun(graph, decision)
    assert "mlp.down_proj.linear.mm" not in rerun(graph, decision)


def test_a_matrix_product_that_nobody_named_is_never_re_run():
    graph = llama()
    for patterns in (DEFAULT_SELECT, (r".*\.norm",), (r"attention\.(mul|add|cat)",), (r".*\.norm", *DEFAULT_SELECT)):
        decision = select(graph, *patterns)
        assert not any(graph.operators[i].heavy for i in decision.rerun)


def test_freed_bytes_are_not_additive():
    graph = llama()
    parts = (r"attention\.flash_attention", r"attention\.(mul|add|cat)", r"attention\.w[qk]")
    alone = [select(graph, part).freed for part in parts]
    together = select(graph, *parts).freed
    assert together > sum(alone)


def test_two_patterns_for_one_operator_free_it_once():
    graph = llama()
    assert select(graph, r"mlp\.mul", r"feed_forward\.mul").freed == select(graph, r"mlp\.mul").freed == WIDE


# ---- softmax ----


def softmax_layer() -> Graph:
    b = Builder()
    scores = b.call("self_attn", "matmul", ("x", "x"), 64, saves=("x",), aten="bmm", heavy=True, out="scores")
    own = b.call("self_attn", "softmax", (scores,), 64, own=True, aten="_softmax", out="softmax")
    return b.graph(b.call("self_attn", "matmul", (own, "x"), HIDDEN, saves=(own, "x"), aten="bmm", heavy=True))


def test_softmax_alone_frees_nothing_and_says_why():
    decision = select(softmax_layer(), r"attention\.softmax")
    assert (decision.freed, decision.dropped, decision.extra, decision.rerun) == (0, (), (), ())
    (declined,) = decision.declined
    assert declined.pattern == r"attention\.softmax"
    assert "saves nothing: self_attn.softmax._softmax keeps its own result (64 B)" in declined.reason


def test_softmax_with_its_scores_frees_the_probabilities():
    decision = select(softmax_layer(), r"attention\.softmax", r"attention\.matmul")
    assert (decision.freed, decision.dropped) == (64, ("softmax",))
    assert [one.pattern for one in decision.declined] == [r"attention\.matmul"]


def test_probabilities_in_a_wider_type_than_the_scores_are_worth_half():
    graph = llama(eager=True)
    decision = select(graph, r"attention\.softmax")
    assert decision.freed == 128 * MIB
    assert len(decision.extra) == 1


# ---- what is declined ----


def test_an_operator_whose_result_nothing_saves_is_declined_with_the_reason():
    (declined,) = select(llama(), r"input_layernorm\.mean").declined
    assert "backward needs nothing" in declined.reason


def test_the_layers_output_belongs_to_the_next_layer():
    b = Builder()
    relu = b.call("", "relu", ("x",), HIDDEN, own=True, out="y")
    graph = b.graph(relu)
    decision = select(graph, "relu")
    assert decision.kept == ("y",)
    assert "next layer" in decision.declined[0].reason


def test_a_pattern_that_hits_nothing_is_not_declined_here():
    assert select(llama(), r"nope\.mul").declined == ()


def test_a_communication_pattern_without_a_collective_is_declined():
    decision = decide(llama(), LayerPolicy(comm=DEFAULT_COMM))
    assert decision.freed == 0
    assert "no collective" in decision.declined[0].reason


def test_a_broken_pattern_is_an_error():
    with pytest.raises(EvenloadError, match="at character"):
        select(llama(), "(")


# ---- values of several operators ----


def test_an_operator_with_two_results_runs_again_once():
    graph = llama()
    decision = select(graph, r"attention\.flash_attention")
    assert set(decision.dropped) == {"sdpa", "lse"}
    assert rerun(graph, decision) == [
        "self_attn.scaled_dot_product_attention._scaled_dot_product_flash_attention_for_cpu"
    ]
    assert decision.freed == HIDDEN + MIB // 8


def test_a_result_that_two_operators_save_is_counted_once():
    b = Builder(8)
    wide = b.call("", "to", ("x",), 100, out="wide")
    first = b.call("", "exp", (wide,), 100, saves=(wide,), out="first")
    b.call("", "sin", (wide,), 100, saves=(wide,), out="second")
    decision = select(b.graph(first), "to")
    assert (decision.freed, decision.extra) == (92, ("x",))


def test_the_input_costs_nothing_where_something_saves_it():
    b = Builder(8)
    wide = b.call("", "to", ("x",), 100, saves=("x",), out="wide")
    graph = b.graph(b.call("", "exp", (wide,), 4, saves=(wide,)))
    decision = select(graph, "to")
    assert (decision.freed, decision.extra, decision.kept) == (100, (), ("x",))


def test_held_values_are_never_counted():
    b = Builder(8)
    table = b.call("", "cast", ("w",), 100, out="table")
    graph = b.graph(b.call("", "mul", ("x", table), 8, saves=(table,)))
    decision = select(graph, "cast")
    assert (decision.freed, decision.kept, decision.extra) == (100, (), ())


# ---- communication ----


def gathered(*, tp: int = 4, layout: bool = False) -> Graph:
    """A norm on a shard of the sequence, its gather, and a projection of the whole sequence."""
    b = Builder(64)
    norm = b.call("input_layernorm", "rms_norm", ("x",), 64, saves=("x",), out="norm")
    whole = b.call("self_attn", "all_gather", (norm,), tp * 64, comm="all_gather", comm_bytes=48, out="whole")
    if layout:
        whole = b.call("self_attn", "wait_tensor", (whole,), tp * 64)
        whole = b.call("self_attn", "cat", (whole,), tp * 64, out="cat")
    q = b.linear("self_attn.q_proj", whole, tp * 64)
    return b.graph(b.call("self_attn", "reduce_scatter", (q,), 64, comm="reduce_scatter", comm_bytes=48, out="y"))


def test_the_norm_pattern_re_runs_the_gather_behind_the_norm():
    graph = gathered()
    decision = decide(graph, LayerPolicy.of(Recompute.COMM))
    assert decision.dropped == ("whole",)
    assert decision.freed == 4 * 64
    assert rerun(graph, decision) == ["input_layernorm.rms_norm", "self_attn.all_gather"]


def test_what_only_lays_out_the_gathered_parts_belongs_to_the_collective():
    graph = gathered(layout=True)
    decision = decide(graph, LayerPolicy.of(Recompute.COMM))
    assert decision.dropped == ("cat",)
    assert rerun(graph, decision)[-1] == "self_attn.cat"


def test_selected_operators_do_not_re_run_a_collective():
    graph = gathered()
    decision = select(graph, r".*\.norm")
    assert decision.rerun == ()
    assert collectives(graph, match(r".*\.norm", graph).indices) == {1}


def test_a_collective_can_be_named_itself():
    graph = gathered()
    assert decide(graph, LayerPolicy(comm=(r"attention\.all_gather",))).dropped == ("whole",)
    assert select(graph, r"attention\.all_gather").dropped == ("whole",)


def test_full_recompute_without_its_communication_keeps_what_was_received():
    graph = gathered()
    again = decide(graph, LayerPolicy(full=True))
    kept = decide(graph, LayerPolicy(full=True), mp_comm=False)
    assert again.kept == ("x",)
    assert kept.kept == ("x", "whole")
    assert kept.rerun == ()  # all that backward needs is kept: the norm saves its input


def scaled(*, flags=None, operator_flags=None) -> Graph:
    """x -> exp -> mul -> add; backward needs exp's result, mul's operands and a mask."""
    flags, operator_flags = flags or {}, operator_flags or {}
    values = [("x", 10), ("mask", 2), ("a", 10), ("b", 10), ("y", 10)]
    rows = [("exp", ("x",), "a", ("a",)), ("mul", ("a", "mask"), "b", ("a", "mask")), ("add", ("b",), "y", ("b",))]
    return Graph(
        values=tuple(
            Value(name=name, nbytes=size, given=name == "mask", **flags.get(name, {})) for name, size in values
        ),
        operators=tuple(
            Operator(path="", name=name, inputs=reads, outputs=(made,), saves=saves, **operator_flags.get(name, {}))
            for name, reads, made, saves in rows
        ),
        input="x",
        output="y",
    )


def test_a_mask_that_comes_in_costs_its_bytes_only_where_nothing_saves_it():
    assert decide(scaled(), LayerPolicy(select=("mul",))).freed == 10
    unsaved = Graph(
        values=(Value(name="x", nbytes=3), Value(name="mask", nbytes=4, given=True), Value(name="y", nbytes=9)),
        operators=(Operator(path="", name="add", inputs=("x", "mask"), outputs=("y",), saves=("y",)),),
        input="x",
        output="x",
    )
    decision = select(unsaved, "add")
    assert decision.extra == ("x", "mask")
    assert decision.freed == 9 - 3 - 4


def test_what_is_written_over_is_never_kept():
    freely = select(scaled(), "mul", "exp")
    assert freely.kept == ("mask", "a")
    assert freely.dropped == ("b",)
    # exp's own result can be kept in any case, because backward needs it; x could only be kept for nothing else
    forced = select(scaled(flags={"x": {"keepable": False}}), "mul", "exp")
    assert forced.kept == ("mask", "a")
    hidden = Graph(
        values=(Value(name="x", nbytes=1, keepable=False), Value(name="a", nbytes=9), Value(name="y", nbytes=1)),
        operators=(
            Operator(path="", name="neg", inputs=("x",), outputs=("a",), saves=("a",)),
            Operator(path="", name="sum", inputs=("a",), outputs=("y",)),
        ),
        input="x",
        output="y",
    )
    assert select(hidden, "neg").freed == 0


def test_what_leaves_the_layer_is_no_saving():
    decision = select(scaled(flags={"b": {"escapes": True}}), "mul")
    assert decision.freed == 0
    assert decision.declined[0].reason == "what it makes leaves the layer and is held there"
    assert decide(scaled(flags={"b": {"escapes": True}}), LayerPolicy(full=True)).kept == ("x", "mask", "b")


def test_what_must_run_once_is_never_re_run():
    decision = select(scaled(operator_flags={"mul": {"once": True}}), "mul")
    assert (decision.freed, decision.rerun) == (0, ())
    full = decide(scaled(operator_flags={"mul": {"once": True}}), LayerPolicy(full=True))
    assert full.kept == ("x", "mask", "b")


def test_an_excluded_operator_stays_kept_under_a_wider_pattern_and_under_full_recompute():
    graph = scaled()
    assert select(graph, ".*").dropped == ("b",)
    decision = decide(graph, LayerPolicy(select=(".*",), select_exclude=("mul",)))
    assert (decision.dropped, decision.rerun) == ((), ())
    assert decide(graph, LayerPolicy(full=True)).kept == ("x", "mask")
    full = decide(graph, LayerPolicy(full=True, select_exclude=("mul",)))
    assert full.kept == ("x", "mask", "b")
    assert full.dropped == ("a",)
    covered = decide(graph, LayerPolicy(select=("mul",), select_exclude=("m.*",)))
    assert covered.declined[0].reason == "an exclude pattern names all that it hits"


def test_an_excluded_collective_keeps_what_it_received():
    graph = gathered()
    assert decide(graph, LayerPolicy(comm=(r".*\.norm",), comm_exclude=(r".*\.norm",))).dropped == ()
    assert decide(graph, LayerPolicy(full=True, comm_exclude=(r".*\.norm",))).kept == ("x", "whole")


# ---- against every possible choice, on small random layers ----


def needed_again(graph: Graph, targets: set[str], there: set[str], allowed: set[int]) -> set[int] | None:
    """Operators to re-run so that every target is there, or None if that is impossible."""
    again: set[int] = set()
    todo = [name for name in targets if name not in there]
    while todo:
        producer = graph.producers.get(todo.pop())
        if producer is None or producer not in allowed:
            return None
        if producer not in again:
            again.add(producer)
        todo += [name for name in graph.operators[producer].inputs if name not in there and name not in todo]
    return again


def every_choice(graph: Graph, targets: set[str], free: set[str], allowed: set[int]):
    """(bytes, operators re-run) of every set of values that makes all targets available."""
    candidates = [value.name for value in graph.values if value.name not in free]
    for size in range(len(candidates) + 1):
        for chosen in combinations(candidates, size):
            again = needed_again(graph, targets, free | set(chosen), allowed)
            if again is not None:
                yield graph.total(chosen), len(again)


@settings(max_examples=300, deadline=None)
@given(layers())
def test_the_cut_is_the_cheapest_choice_and_re_runs_least(case):
    graph, matched = case
    decision = cut(graph, matched)
    saved = {name for op in graph.operators for name in op.saves if not graph.by_name[name].held}
    made = {name for i in matched for name in graph.operators[i].outputs}
    targets = (saved & made) - {graph.output}
    free = (saved - targets) | {"w"}
    allowed = {i for i, op in enumerate(graph.operators) if i in matched or not (op.heavy or op.comm)}

    best = min(every_choice(graph, targets, free, allowed))
    kept_for_targets = set(decision.kept) - free
    assert graph.total(kept_for_targets) == best[0]
    assert len(decision.rerun) == best[1]

    assert needed_again(graph, targets, free | set(decision.kept), allowed) == set(decision.rerun)
    assert set(decision.dropped) == targets - set(decision.kept)
    assert set(decision.extra) == set(decision.kept) - saved
    assert decision.kept_bytes == graph.total(decision.kept)
    assert decision.freed == graph.kept_bytes - decision.kept_bytes >= 0


@settings(max_examples=200, deadline=None)
@given(layers(), st.booleans())
def test_full_recompute_has_all_it_needs_and_no_more(case, mp_comm):
    graph, _ = case
    decision = decide(graph, LayerPolicy(full=True), mp_comm=mp_comm)
    targets = {name for op in graph.operators for name in op.saves} - {"w", "x"}
    allowed = {i for i, op in enumerate(graph.operators) if mp_comm or not op.comm}
    best = min(every_choice(graph, targets, {"w", "x"}, allowed))
    assert graph.total(set(decision.kept) - {"x"}) == best[0]
    needed = needed_again(graph, targets, {"w", *decision.kept}, allowed)
    assert needed is not None
    assert len(needed) == best[1]
    if mp_comm:
        assert decision.kept == ("x",)
        assert decision.rerun == tuple(range(max(needed, default=-1) + 1))
    else:
        assert set(decision.rerun) == needed


@settings(max_examples=100, deadline=None)
@given(layers(), st.data())
def test_matching_more_never_keeps_more(case, data):
    graph, matched = case
    fewer = data.draw(st.sets(st.sampled_from(sorted(matched)))) if matched else set()
    assert cut(graph, matched).kept_bytes <= cut(graph, fewer).kept_bytes

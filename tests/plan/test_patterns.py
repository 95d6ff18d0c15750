from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.graphs import llama, named

from evenload import EvenloadError
from evenload.plan.operators import Graph
from evenload.plan.patterns import as_pattern, compile_pattern, coverage, match, own_pattern
from evenload.plan.policy import DEFAULT_COMM, DEFAULT_SELECT

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "mindformers_patterns.json").read_text())


def hits(pattern: str, graph: Graph) -> set[str]:
    return {operator.label for operator in match(pattern, graph).operators}


@pytest.mark.parametrize("pattern", [text for text, found in RECORDED["hits"].items() if found != "error"])
def test_the_grammar_hits_what_mindformers_was_recorded_to_hit(pattern):
    compiled = compile_pattern(pattern)
    names = [*RECORDED["operators"], *RECORDED["modules"]]
    assert {name for name in names if compiled.matches(tuple(name.split(".")))} == set(RECORDED["hits"][pattern])


@pytest.mark.parametrize("pattern", [text for text, found in RECORDED["hits"].items() if found == "error"])
def test_a_pattern_that_mindformers_fails_on_late_is_refused_at_once_with_its_place(pattern):
    with pytest.raises(EvenloadError, match=r"at character \d+") as caught:
        compile_pattern(pattern)
    assert caught.value.fix


def test_a_dot_inside_brackets_is_explained():
    with pytest.raises(EvenloadError, match="at character 5") as caught:
        compile_pattern(r"feed[_\.]forward\.mul")
    assert "plain dot" in (caught.value.fix or "")
    assert compile_pattern(r"feed[_.]forward\.mul").matches(("feed_forward", "mul"))


def test_a_doubled_backslash_is_explained():
    with pytest.raises(EvenloadError) as caught:
        compile_pattern(r"feed_forward\\.mul")
    assert r"write feed_forward\.mul" in (caught.value.fix or "")


def test_the_place_of_an_error_counts_from_the_start_of_the_whole_pattern():
    with pytest.raises(EvenloadError, match="at character 15"):
        compile_pattern(r"feed_forward\.(")


@pytest.mark.parametrize("wrong", [7, None, True, ["a"], b"a", 1.5])
def test_what_is_no_text_is_refused(wrong):
    with pytest.raises(EvenloadError, match="is no text"):
        compile_pattern(wrong)


# ---- names of three styles on one layer ----

STYLES = {
    "mlp.mul": [r"feed_forward\.mul", r"mlp\.mul"],
    "mlp.act_fn.silu": [
        r"feed_forward\.w1\.activation\.silu",
        r"feed_forward\.silu",
        r"mlp\.act_fn\.silu",
        r"mlp\.act_fn",
        r"mlp\.activation_func\.silu",
        r"mlp\.activation_func",
    ],
    "mlp.gate_proj.linear.mm": [
        r"feed_forward\.w1\.matmul",
        r"feed_forward\.w1\.linear",
        r"mlp\.gate_proj",
        r"mlp\.gate_proj\.linear",
        r"mlp\.gate_proj\.mm",
        r"mlp\.gate_proj\.linear\.mm",
        r"mlp\.gate_proj\.matmul",
    ],
    "mlp.up_proj.linear.mm": [r"feed_forward\.w3\.matmul", r"feed_forward\.w3", r"mlp\.up_proj\.linear"],
    "mlp.down_proj.linear.mm": [r"feed_forward\.w2\.matmul", r"mlp\.down_proj", r"mlp\.linear_fc2\.matmul"],
    "self_attn.q_proj.linear.mm": [r"attention\.wq", r"attention\.wq\.matmul", r"self_attn\.q_proj\.mm"],
    "self_attn.o_proj.linear.mm": [r"attention\.wo", r"self_attention\.linear_proj", r"self_attn\.o_proj"],
    "self_attn.scaled_dot_product_attention._scaled_dot_product_flash_attention_for_cpu": [
        r"attention\.flash_attention",
        r"self_attention\.core_attention",
        r"attention\.inner_attention",
        r"self_attn\.scaled_dot_product_attention",
    ],
}


@pytest.mark.parametrize(("operator", "pattern"), [(op, text) for op, texts in STYLES.items() for text in texts])
def test_one_operator_answers_to_its_name_in_every_style(operator, pattern):
    assert hits(pattern, llama()) == {operator}


def test_the_fused_projections_of_megatron_stand_for_all_that_they_fuse():
    graph = llama()
    assert hits(r"self_attention\.linear_qkv", graph) == {f"self_attn.{part}_proj.linear.mm" for part in "qkv"}
    assert hits(r"mlp\.linear_fc1", graph) == {"mlp.gate_proj.linear.mm", "mlp.up_proj.linear.mm"}


def test_w1_is_mindformers_cell_with_the_activation_inside():
    assert hits(r"feed_forward\.w1", llama()) == {"mlp.gate_proj.linear.mm", "mlp.act_fn.silu"}


def test_the_default_patterns_hit_the_default_pair_and_both_norms():
    graph = llama()
    assert hits(DEFAULT_SELECT[0], graph) | hits(DEFAULT_SELECT[1], graph) == {"mlp.mul", "mlp.act_fn.silu"}
    (comm,) = DEFAULT_COMM
    assert {op.path for op in match(comm, graph).operators} == {"input_layernorm", "post_attention_layernorm"}


@pytest.mark.parametrize(
    ("pattern", "module"),
    [
        (r"attention_norm\.norm", "input_layernorm"),
        (r"attention_norm", "input_layernorm"),
        (r"input_layernorm\.norm", "input_layernorm"),
        (r"ffn_norm\.norm", "post_attention_layernorm"),
        (r"pre_mlp_layernorm", "post_attention_layernorm"),
        (r"post_attention_layernorm\..*", "post_attention_layernorm"),
    ],
)
def test_a_norm_answers_as_a_whole(pattern, module):
    found = match(pattern, llama())
    assert {op.path for op in found.operators} == {module}
    assert len(found.indices) == 8


def test_naming_a_module_says_so():
    assert match(r"feed_forward", llama()).whole_module
    assert not match(r"feed_forward\.mul", llama()).whole_module


def test_softmax_is_found_under_eager_attention_only():
    assert hits(r"attention\.softmax", llama(eager=True)) == {"self_attn.softmax._softmax"}
    assert not match(r"attention\.softmax", llama())


def test_gemma_has_four_norms_and_each_has_its_own_name():
    graph = named(
        "input_layernorm:mul",
        "post_attention_layernorm:mul",
        "pre_feedforward_layernorm:mul",
        "post_feedforward_layernorm:mul",
    )
    assert hits(r"ffn_norm\.norm", graph) == {"pre_feedforward_layernorm.mul"}
    assert hits(r"pre_mlp_layernorm", graph) == {"pre_feedforward_layernorm.mul"}
    assert hits(r"attention_norm\.norm", graph) == {"input_layernorm.mul"}
    assert hits(r"post_mlp_layernorm\.norm", graph) == {"post_feedforward_layernorm.mul"}
    assert len(hits(r".*\.norm", graph)) == 4


def test_norms_of_q_and_k_are_one_level_deeper_than_the_default_pattern_looks():
    graph = named("input_layernorm:mul", "self_attn.q_norm:mul", "self_attn.k_norm:mul")
    assert hits(r".*\.norm", graph) == {"input_layernorm.mul"}
    assert hits(r"attention\.q_norm\.norm", graph) == {"self_attn.q_norm.mul"}
    assert hits(r"self_attention\.k_layernorm", graph) == {"self_attn.k_norm.mul"}
    assert len(hits(r".*\.[qk]_norm\.norm", graph)) == 2


MOE = (
    "mlp.gate:linear:mm",
    "mlp.experts:grouped_mm:_grouped_mm",
    "mlp.experts.act_fn:silu",
    "mlp.experts:mul",
    "mlp.shared_experts.gate_proj:linear:mm",
    "mlp.shared_experts.act_fn:silu",
    "mlp.shared_experts:mul",
    "mlp:add",
)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        (r"mlp\.shared_experts\.mul", {"mlp.shared_experts.mul"}),
        (r"mlp\.shared_experts\.activation_func\.silu", {"mlp.shared_experts.act_fn.silu"}),
        (r"feed_forward\.shared_experts\.mul", {"mlp.shared_experts.mul"}),
        (r"feed_forward\.shared_experts\.w1\.activation\.silu", {"mlp.shared_experts.act_fn.silu"}),
        (r"moe\.shared_experts\.w1\.linear", {"mlp.shared_experts.gate_proj.linear.mm"}),
        (r"moe\.experts", {"mlp.experts.grouped_mm._grouped_mm", "mlp.experts.act_fn.silu", "mlp.experts.mul"}),
        (r"block_sparse_moe\.experts\.mul", {"mlp.experts.mul"}),
        (r"block_sparse_moe\.gate", {"mlp.gate.linear.mm"}),
        (r"mlp\.router", {"mlp.gate.linear.mm"}),
        (r"feed_forward\.routed_experts\.ffn\.mul", {"mlp.experts.mul"}),
        (r"mlp\.experts\.matmul", {"mlp.experts.grouped_mm._grouped_mm"}),
        (r"moe\.add", {"mlp.add"}),
        (r"feed_forward\.mul", set()),
    ],
)
def test_experts_answer_in_every_style(pattern, found):
    assert hits(pattern, named(*MOE)) == found


def test_a_dense_layer_has_no_name_of_an_expert_layer():
    assert not match(r"block_sparse_moe\..*", llama())
    assert not match(r"moe", llama())


@pytest.mark.parametrize(
    ("module", "patterns"),
    [
        ("q_a_proj", [r"attention\.q2l_proj", r"attention\.wq_a", r"self_attention\.linear_q_down_proj"]),
        ("q_a_layernorm", [r"attention\.lq_norm\.norm", r"attention\.q_norm", r"self_attention\.q_layernorm"]),
        ("q_b_proj", [r"attention\.l2q_proj\.matmul", r"attention\.wq_b", r"self_attention\.linear_q_up_proj"]),
        ("kv_a_proj_with_mqa", [r"attention\.kv2l", r"attention\.wkv_a", r"self_attention\.linear_kv_down_proj"]),
        ("kv_a_layernorm", [r"attention\.lkv_norm\.norm", r"attention\.kv_norm", r"self_attention\.kv_layernorm"]),
        ("kv_b_proj", [r"attention\.lkv2kv\.matmul", r"attention\.wkv_b", r"self_attention\.linear_kv_up_proj"]),
    ],
)
def test_latent_attention_answers_in_every_style(module, patterns):
    parts = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
    graph = named(*(f"self_attn.{part}:{'mul' if part.endswith('norm') else 'linear:mm'}" for part in parts))
    for pattern in (*patterns, rf"self_attn\.{module}"):
        assert {op.path for op in match(pattern, graph).operators} == {f"self_attn.{module}"}, pattern


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("__rsub__:rsub", ["rsub", "sub", "__rsub__"]),
        ("__rdiv__:reciprocal", ["div", "rdiv", "reciprocal"]),
        ("__rpow__:pow", ["pow"]),
        ("__getitem__:slice", ["getitem", "slice"]),
        ("__imul__:mul_", ["mul", "mul_"]),
        ("float:_to_copy", ["to", "cast", "float", "_to_copy", "to_copy"]),
        ("true_divide:div", ["div"]),
        ("linear:addmm", ["matmul", "linear", "addmm"]),
        ("concat:cat", ["cat", "concat"]),
    ],
)
def test_python_operators_and_casts_have_their_plain_names(name, words):
    for word in words:
        assert match(rf"mlp\.{word}", named(f"mlp:{name}")), word


def test_a_fused_gate_answers_to_the_default_pair():
    graph = named("mlp.gate_up_proj:linear:mm", "mlp.act_fn:swiglu", "mlp.down_proj:linear:mm")
    assert hits(r"feed_forward\.w1\.activation\.silu", graph) == {"mlp.act_fn.swiglu"}
    assert hits(r"feed_forward\.mul", graph) == {"mlp.act_fn.swiglu"}
    assert hits(r"feed_forward\.w_gate_hidden", graph) == {"mlp.gate_up_proj.linear.mm"}


def test_an_unknown_module_keeps_its_own_name_below_a_renamed_one():
    assert match(r"attention\.indexer\.wk", named("self_attn.indexer.wk:linear:mm"))


def test_an_operator_of_the_layer_itself_has_one_level():
    assert hits("add", llama()) == {"add"}


def test_the_own_pattern_of_an_operator_hits_it():
    graph = llama(eager=True)
    for operator in graph.operators:
        found = match(own_pattern(operator), graph).operators
        assert operator in found
        assert {(other.path, other.name) for other in found} == {(operator.path, operator.name)}


# ---- patterns that hit nothing ----


def test_an_unescaped_dot_is_the_likely_mistake_and_is_mended():
    found = coverage("feed_forward.mul", [llama()] * 32)
    notice = found.notice("$.select_recompute[0]")
    assert notice is not None
    assert notice.fact == "pattern 'feed_forward.mul' matches nothing: matched 0 of 32 layers"
    assert notice.fix is not None
    assert notice.fix.startswith(r"write feed_forward\.mul")
    assert notice.where == "$.select_recompute[0]"


@pytest.mark.parametrize("text", ["feed_forward.w1.activation.silu", "mlp.act_fn.silu", r"feed_forward.w1\.matmul"])
def test_every_unescaped_dot_of_a_pattern_is_mended(text):
    fix = coverage(text, [llama()]).fix
    assert fix is not None
    mended = fix.removeprefix("write ").split(":")[0]
    assert match(mended, llama())


def test_a_misspelt_name_gets_the_nearest_ones():
    fix = coverage(r"feed_foward\.mul", [llama()]).fix
    assert fix is not None
    assert r"feed_forward\.mul" in fix


def test_a_name_far_from_all_gets_the_way_to_the_list():
    assert "evenload names" in (coverage("zzzz", [llama()]).fix or "")


def test_layers_are_counted_and_a_pattern_that_hits_some_is_no_mistake():
    moe = named(*MOE)
    found = coverage(r"mlp\.shared_experts\.mul", [llama(), moe, moe])
    assert (found.matched, found.layers, found.notice()) == (2, 3, None)


def test_no_layers_give_no_warning():
    assert coverage(r"nope\.mul", []).notice() is None


# ---- safety ----

SLOW = [
    "(a+)+b",
    "(a*)*",
    "(a|a)*x",
    "(a|aa)+x",
    "([a-z]+_?)+x",
    "(.*)(.*)(.*)(.*)x",
    ".*.*.*.*.*x",
    "a?" * 30 + "a" * 30,
    "(a|b|ab)" * 12 + "x",
    "(?:a{1,30}){1,30}x",
    "((a{2,9})b?)+",
    "(?=(a+)+b).*",
]


@pytest.mark.parametrize("expression", SLOW)
def test_an_expression_that_could_take_for_ever_is_refused(expression):
    with pytest.raises(EvenloadError, match="for ever") as caught:
        compile_pattern(rf"mlp\.{expression}")
    assert caught.value.fix


@pytest.mark.parametrize(
    "expression",
    [
        ".*",
        ".*attn.*proj.*",
        "w[13]",
        "(w1|w3|w2)",
        "(?:gate|up|down)_proj",
        "a{3}",
        "(ab){2}",
        "a+",
        "(ab)*",
        "(?i)SILU",
        r"\w+",
        "[]a]+",
        "[^]a]*",
        "(?P<x>a)b?",
        "(?!mlp).*",
        "a{,3}",
        "a{",
        "x*?",
        "x*+",
        r"\(\)",
    ],
)
def test_ordinary_expressions_are_accepted(expression):
    assert compile_pattern(rf"mlp\.{expression}").levels[1].pattern == expression


def test_a_huge_repeat_or_pattern_is_refused():
    for text in ("a{99999999999999999999}", "a" * 1000, "(" * 200 + "a" + ")" * 200 + "+" * 1 + "(" * 60):
        with pytest.raises(EvenloadError):
            compile_pattern(text)


@given(st.text(alphabet="ab(|)*+?{1,3}[]^.\\d", max_size=24))
def test_whatever_is_accepted_answers_soon_and_the_rest_is_a_clear_error(text):
    try:
        pattern = compile_pattern(text)
    except EvenloadError:
        return
    for part in ("a" * 40, "ab" * 20 + "!"):  # a runaway expression would never come back from here
        assert all(isinstance(level.fullmatch(part), re.Match | None) for level in pattern.levels)


@given(st.lists(st.from_regex(r"[a-z_0-9.*+]{1,8}", fullmatch=True), min_size=1, max_size=4))
def test_the_pattern_of_a_name_matches_that_name(name):
    name = [part.replace(".", "_") for part in name]
    assert compile_pattern(as_pattern(name)).matches(tuple(name))


def test_the_default_patterns_are_regular_expressions_of_the_grammar():
    for text in (*DEFAULT_SELECT, *DEFAULT_COMM):
        assert all(re.compile(part) for part in text.split(r"\."))


# ---- layers written as in torchtitan ----

TITAN = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.qkv_linear.wq",
    "self_attn.k_proj": "attention.qkv_linear.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn": "attention.inner_attention",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.act_fn": "feed_forward",
    "mlp": "feed_forward",
}


@pytest.mark.parametrize(
    "pattern",
    [
        *(*DEFAULT_SELECT, *DEFAULT_COMM),
        *(
            r"feed_forward\.w1\.matmul",
            r"feed_forward\.w3\.matmul",
            r"mlp\.gate_proj",
            r"mlp\.act_fn",
            r"mlp\.act_fn\.silu",
        ),
        *(r"attention\.wq", r"self_attn\.q_proj\.linear", r"ffn_norm\.norm", "attention_norm", r"mlp\..*", "self_attn"),
        *(r"attention\.flash_attention", r"self_attn\.scaled_dot_product_attention", r"self_attention\.core_attention"),
    ],
)
def test_a_torchtitan_layer_answers_to_what_a_hugging_face_layer_answers(pattern):
    here = llama()
    there = replace(here, operators=tuple(replace(one, path=TITAN.get(one.path, one.path)) for one in here.operators))
    assert match(pattern, there).indices == match(pattern, here).indices != ()


def test_a_torchtitan_layer_answers_to_its_own_names():
    titan = llama()
    titan = replace(titan, operators=tuple(replace(one, path=TITAN.get(one.path, one.path)) for one in titan.operators))
    assert hits(r"feed_forward\.silu", titan) == {"feed_forward.silu"}
    assert hits(r"attention\.qkv_linear\.wq", titan) == {"attention.qkv_linear.wq.linear.mm"}
    inside = hits(r"attention\.inner_attention\..*", titan)
    assert any(one.startswith("attention.inner_attention.scaled_dot_product_attention") for one in inside)

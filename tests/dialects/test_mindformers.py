"""MindFormers r1.x settings are read as MindFormers means them, with a warning for whatever is assumed."""

from pathlib import Path

import pytest

from evenload.dialects.detect import read_settings
from evenload.dialects.mindformers import read_mindformers
from evenload.dialects.yaml_source import parse_yaml
from evenload.errors import EvenloadError
from evenload.model.huggingface import model_from_config
from evenload.plan.policy import counts
from evenload.setup import Setup
from evenload.units import GIB

DATA = Path(__file__).parent.parent / "data" / "dialects"


def read(text, **given):
    return read_mindformers(parse_yaml(text, name="m.yaml"), **given)


def facts(reading):
    return [notice.fact for notice in reading.notices]


def test_the_documented_example_logs_the_documented_lines():
    log = read_settings(DATA / "seed.yaml").log
    assert list(log) == (DATA / "seed.log").read_text().splitlines()


def test_a_published_configuration_is_read_whole():
    reading = read_settings(DATA / "glm4_9b.yaml")
    plan = reading.plan
    assert plan.layout.table == ((9, 10, 12, 9),)
    assert counts(plan.policy.full, plan.layout) == ((6, 3, 2, 3),)
    assert {layer for layer in range(40) if plan.for_layer(layer).full} == {*range(6), 9, 10, 11, 19, 20, 31, 32, 33}
    assert plan.setup == Setup(
        pp=4, dp=2, zero=1, micro_batches=64, seq=8192, dtype="bf16", grad_dtype="fp32", master_weights=True,
        backend="mindspore", hardware="ascend-910b",
    )  # fmt: skip
    assert plan.policy.slice_activation
    assert reading.limit == 58 * GIB, "MindSpore's 58GB are 58 * 2**30 bytes"
    assert reading.model_config is None, "another architecture than Llama is not guessed at"


def test_interleave_without_its_switch_is_taken_as_on_and_said():
    reading = read_settings(DATA / "telechat3_36b.yaml")
    assert reading.plan.layout.table == ((16, 16), (16, 16))
    assert counts(reading.plan.policy.full, reading.plan.layout) == ((14, 14), (14, 14))
    (said,) = [notice for notice in reading.notices if "pipeline_interleave is not in the file" in notice.fact]
    assert said.where is not None
    assert said.where.endswith("telechat3_36b.yaml:5:24")


def test_counts_above_the_layers_of_a_chunk_are_cut_and_said():
    reading = read_settings(DATA / "thousand_cards.yaml")
    table = reading.plan.layout.table
    assert table == ((1, *[2] * 15), (1, *[2] * 15), (*[2] * 14, 3, 3))
    assert reading.tables is not None
    assert reading.tables.select[r"feed_forward\.mul"] == (
        (1, *[2] * 15),
        (1, *[2] * 15),
        (*[2] * 14, 3, 1),
    )
    (said,) = [notice for notice in reading.notices if "asks for 2 layers" in notice.fact]
    assert said.where is not None
    assert said.where.endswith("thousand_cards.yaml:17:26")


def test_a_missing_remainder_is_refused_with_an_offset_that_works():
    with pytest.raises(EvenloadError) as caught:
        read(
            "model_config: {num_layers: 61, pp_interleave_num: 2, offset: 0}\nparallel_config: {pipeline_stage: 8}\n"
            "parallel: {pipeline_config: {pipeline_interleave: True}}"
        )
    assert "must sum to 13" in caught.value.fact
    assert caught.value.where == "m.yaml:1:62"
    works = caught.value.fix.removeprefix("offset: ").removesuffix(" works")
    settings = f"model_config: {{num_layers: 61, pp_interleave_num: 2, offset: {works}}}"
    assert read(settings + "\nparallel_config: {pipeline_stage: 8}").plan.layout.num_layers == 61


def test_a_shift_of_layers_needs_a_remainder_of_nothing():
    text = "model_config: {{num_layers: {}, offset: [-2, 1, 1, 0]}}\nparallel_config: {{pipeline_stage: 4}}"
    assert read(text.format(32)).plan.layout.table == ((6, 9, 9, 8),)
    with pytest.raises(EvenloadError, match="must sum to 2"):
        read(text.format(30))


def test_thirty_layers_on_four_stages_need_an_offset_that_sums_to_two():
    text = "model_config: {{num_layers: 30{}}}\nparallel_config: {{pipeline_stage: 4}}"
    with pytest.raises(EvenloadError, match="must sum to 2"):
        read(text.format(""))
    assert read(text.format(", offset: [0, 1, 1, 0]")).plan.layout.table == ((7, 8, 8, 7),)


def test_interleave_that_is_off_makes_one_and_is_said():
    text = """
model: {model_config: {num_layers: 8, pp_interleave_num: 2, offset: %s}}
parallel: {pipeline_config: {pipeline_interleave: off}}
parallel_config: {pipeline_stage: 2}
"""
    reading = read(text % "0")
    assert reading.plan.layout.table == ((4, 4),)
    assert "pipeline_interleave is off, so MindFormers takes pp_interleave_num as 1 instead of 2" in facts(reading)
    with pytest.raises(EvenloadError) as caught:
        read(text % "[[0, 1], [0, -1]]")
    assert caught.value.where == "m.yaml:2:69"
    assert caught.value.fix is not None
    assert "pipeline_interleave: True" in caught.value.fix


def test_single_sections_are_enough():
    reading = read("recompute_config:\n  recompute: [2, 1, 0]\n", num_layers=6)
    assert reading.plan.layout.table == ((2, 2, 2),)
    assert "pipeline_stage 3 (entries of recompute)" in facts(reading)[0]
    assert reading.notices[0].where == "m.yaml"
    with pytest.raises(EvenloadError, match="do not say how many layers") as caught:
        read("recompute_config:\n  recompute: [2, 1, 0]\n")
    assert "--model" in caught.value.fix


def test_keys_without_their_section_are_read_too():
    reading = read(
        "num_layers: 48\npipeline_stage: 5\npp_interleave_num: 2\noffset: [[0,1,1,1,1],[1,1,1,1,0]]\n"
        "recompute: [[2,1,0,0,0],[1,0,0,0,0]]\n"
        r"select_recompute: {'feed_forward\.w1\.activation\.silu': true, 'feed_forward\.w3\.matmul': [2,1,0,0,0]}"
    )
    assert reading.plan.layout.table == ((4, 5, 5, 5, 5), (5, 5, 5, 5, 4))
    assert reading.tables.full == ((2, 1, 0, 0, 0), (1, 0, 0, 0, 0))
    assert reading.tables.select[r"feed_forward\.w3\.matmul"] == ((1, 1, 0, 0, 0), (1, 0, 0, 0, 0))


BASE = """model:
  model_config:
    type: LlamaConfig
    num_layers: 8
    offset: [1, -1]
parallel_config:
  pipeline_stage: 2
recompute_config:
  recompute: [2, 1]
  select_recompute:
    'feed_forward\\.mul': [1, 2]
"""


@pytest.mark.parametrize(
    ("old", "new", "fact", "where", "fix"),
    [
        ("pipeline_stage:", "pipeline_stages:", "'pipeline_stages' of parallel_config", "7:3", "'pipeline_stage'"),
        ("  recompute:", "  recomputes:", "the key 'recomputes' of recompute_config", "9:3", "'recompute'"),
        ("select_recompute:", "select_recomput:", "'select_recomput' of recompute_config", "10:3",
         "'select_recompute'"),
        ("offset:", "offsets:", "the key 'offsets' of model.model_config", "5:5", "did you mean 'offset'?"),
        ("num_layers: 8", "num_layer: 8", "the key 'num_layer' of model.model_config", "4:5", "'num_layers'"),
        ("num_layers: 8", "num_layers: eight", "'eight' is not a whole number", "4:17", None),
        ("num_layers: 8", "num_layers: 0", "0 is below 1", "4:17", None),
        ("num_layers: 8", "num_layers: true", "True is not a whole number", "4:17", None),
        ("pipeline_stage: 2", "pipeline_stage: 2.5", "pipeline_stage is 2.5", "7:19", "at least 1"),
        ("pipeline_stage: 2", "pipeline_stage: -1", "pipeline_stage is -1", "7:19", "at least 1"),
        ("pipeline_stage: 2", "pipeline_stage: 3", "2 entries for 3 stages", "5:13", None),
        ("[1, -1]", "[1, 1]", "the offset sums to 2", "5:13", "works"),
        ("[1, -1]", "[9, -9]", "leaves stage 1 of chunk 0 with -5 layers", "5:17", None),
        ("[1, -1]", "[one, -1]", "'one' is not a whole number", "5:14", None),
        ("[2, 1]", "[2, 1, 1]", "3 counts for 2 stages", "9:14", None),
        ("[2, 1]", "[2, -1]", "-1 layers cannot be recomputed", "9:18", None),
        ("[2, 1]", "yes please", "'yes please'", "9:14", None),
        ("[1, 2]", "[[1, 2], [1, 2]]", "2 rows of counts for 1 interleaves", "11:26", None),
        ("'feed_forward\\.mul'", "'feed_forward\\.(mul'", "is no regular expression", "11:5", None),
        ("  recompute: [2, 1]", "  mp_comm_recompute: 1", "1 is neither true nor false", "9:22", None),
        ("parallel_config:\n  pipeline_stage: 2", "parallel_config: 2", "parallel_config is 2, not a mapping",
         "6:18", None),
        ("pipeline_stage: 2", "pipeline_stage: 2\n  model_parallel: 0", "model_parallel is 0", "8:19", None),
        ("pipeline_stage: 2", "pipeline_stage: 2\n  data_parallel: 99999999999", "data_parallel is 99999999999",
         "8:18", None),
        ("pipeline_stage: 2", "pipeline_stage: 2\n  use_seq_parallel: 1", "use_seq_parallel is 1", "8:21", None),
        ("num_layers: 8", "num_layers: 8\n    compute_dtype: bfloat17", "compute_dtype is 'bfloat17'", "5:20",
         "bfloat16"),
        ("parallel_config:", "context: {max_device_memory: 58}\nparallel_config:", "max_device_memory is 58",
         "6:30", "58GB"),
        ("parallel_config:", "context: {max_device_memory: 58QB}\nparallel_config:", "unknown unit", "6:30", None),
        ("parallel_config:", "parallel: {pipeline_config: {pipeline_scheduler: zero_bubble_v}}\nparallel_config:",
         "zero_bubble_v deals", "6:50", None),
        ("parallel_config:", "parallel: {pipeline_config: {pipeline_scheduler: 1f2b}}\nparallel_config:",
         "there is no schedule '1f2b'", "6:50", "'1f1b'"),
        ("parallel_config:", "parallel: {pipeline_config: {pipeline_interleave: maybe}}\nparallel_config:",
         "pipeline_interleave is 'maybe'", "6:51", "True or False"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_place(old, new, fact, where, fix):
    assert old in BASE
    with pytest.raises(EvenloadError) as caught:
        read(BASE.replace(old, new, 1))
    assert fact in caught.value.fact
    assert caught.value.where == f"m.yaml:{where}"
    assert fix is None or (caught.value.fix is not None and fix in caught.value.fix)


@pytest.mark.parametrize(
    ("old", "new", "fact", "where"),
    [
        ("pipeline_stage: 2", "pipeline_stage: 2\n  shiny_new_switch: 1", "the key 'shiny_new_switch' of", "8:3"),
        ("'feed_forward\\.mul'", "feed_forward.mul", "pattern 'feed_forward.mul' names no operator: matched 0 of 3",
         "11:5"),
        ("'feed_forward\\.mul'", "'mlp\\.act_fn'", "matched 0 of 3 layers", "11:5"),
        ("[2, 1]", "[9, 1]", "[0] asks for 9 layers", "9:14"),
        ("[1, -1]", "[1.5, -1]", "1.5 is read as 1", "5:14"),
        ("[2, 1]", "[2]", "1 counts for 2 stages", "9:14"),
        ("parallel_config:", "parallel: {pipeline_config: {pipeline_scheduler: seqpipe}}\nparallel_config:",
         "seqpipe splits sequences", "6:50"),
        ("parallel_config:", "micro_batch_interleave_num: 2\nparallel_config:", "counted as one of 2 sequences",
         "6:29"),
    ],
)  # fmt: skip
def test_what_is_accepted_but_odd_is_a_warning_with_its_place(old, new, fact, where):
    assert old in BASE
    reading = read(BASE.replace(old, new, 1))
    assert [notice.where for notice in reading.notices if fact in notice.fact] == [f"m.yaml:{where}"]


def test_a_plain_dot_is_said_once_and_shown_right():
    reading = read(BASE.replace("'feed_forward\\.mul'", "feed_forward.mul"))
    (said,) = [notice for notice in reading.notices if "feed_forward.mul" in notice.fact]
    assert said.fix is not None
    assert "feed_forward\\.mul" in said.fix


def test_patterns_of_other_architectures_are_not_called_wrong():
    text = BASE.replace("type: LlamaConfig", "type: DeepseekV3Config")
    for pattern in (
        r"mlp\.shared_experts\.mul",
        r"feed_forward\.shared_experts\.w1\.activation\.silu",
        r"attention\.l2q_proj",
    ):
        reading = read(text.replace("feed_forward\\.mul", pattern))
        assert not [fact for fact in facts(reading) if "matched 0" in fact], pattern


def test_a_pattern_on_no_layer_is_not_warned_about():
    assert not [
        fact for fact in facts(read(BASE.replace("'feed_forward\\.mul': [1, 2]", "nonsense: False"))) if "0 of" in fact
    ]


def test_under_swap_numbers_are_layers():
    reading = read(BASE.replace("[2, 1]", "[0, 7]") + "swap_config:\n  swap: True\n")
    assert reading.plan.policy.full == {0, 7}
    assert any("swap is on" in fact for fact in facts(reading))


def test_the_run_is_read_from_every_section():
    reading = read("""
runner_config: {batch_size: 2}
micro_batch_interleave_num: 2
parallel: {enable_parallel_optimizer: True, parallel_optimizer_config: {gradient_accumulation_shard: True},
           pipeline_config: {pipeline_interleave: True, pipeline_scheduler: 1f1b}}
parallel_config: {data_parallel: 4, model_parallel: 8, pipeline_stage: 2, context_parallel: 2, expert_parallel: 2,
                  micro_batch_num: 16, use_seq_parallel: True}
model: {model_config: {num_layers: 8, pp_interleave_num: 2, seq_length: 8192, compute_dtype: float16,
                       param_init_type: float16, use_flash_attention: False}}
""")
    assert reading.plan.setup == Setup(
        pp=2, interleave=2, tp=8, sequence_parallel=True, cp=2, dp=4, ep=2, zero=2, micro_batch=4, micro_batches=16,
        seq=8192, dtype="fp16", attention="eager", backend="mindspore", schedule="mindspore_interleaved",
        hardware="ascend-910b",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "intermediate", "parameters"),
    [
        ("hidden_size: 4096, num_layers: 32, num_heads: 32, multiple_of: 256", 11008, 6_738_415_616),
        ("hidden_size: 5120, num_layers: 40, num_heads: 40", 13824, 13_015_864_320),
        ("hidden_size: 8192, num_layers: 80, num_heads: 64, n_kv_heads: 8, multiple_of: 256, ffn_dim_multiplier: 1.3",
         28672, 68_976_648_192),
        ("hidden_size: 4096, num_layers: 32, num_heads: 32, n_kv_heads: 8, intermediate_size: 14336", 14336, None),
    ],
)  # fmt: skip
def test_llama_models_have_their_published_number_of_parameters(config, intermediate, parameters):
    reading = read(f"model: {{model_config: {{type: LlamaConfig, vocab_size: 32000, {config}}}}}")
    assert reading.model_config is not None
    assert reading.model_config["intermediate_size"] == intermediate
    if parameters is not None:
        assert model_from_config(reading.model_config).parameters == parameters


def test_newer_settings_describe_the_model_in_hugging_face_keys():
    reading = read("model: {model_config: {model_type: qwen3, num_hidden_layers: 4, hidden_size: 64}}")
    assert reading.model_config == {"model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 64}


def test_a_model_with_a_senseless_width_is_named_with_its_place():
    with pytest.raises(EvenloadError) as caught:
        read(
            "model: {model_config: {type: LlamaConfig, num_layers: 4, num_heads: 4, vocab_size: 8, hidden_size: wide}}"
        )
    assert caught.value.where == "m.yaml:1:100"


@pytest.mark.parametrize(
    ("said", "full"),
    [("True", 8), ("False", 0), ("[1, 2]", 3), ("{recompute: [1, 2], select_recompute: True}", 3)],
)
def test_recompute_inside_parallel_config_is_read(said, full):
    text = f"parallel_config: {{pipeline_stage: 2, recompute: {said}}}\nmodel: {{model_config: {{num_layers: 8}}}}"
    policy = read(text).plan.policy
    assert len(policy.full) == full
    assert bool(policy.select) is ("select" in said)


def test_a_section_without_values_is_still_one(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("parallel_config:\nmodel:\n")
    with pytest.raises(EvenloadError, match="do not say how many layers"):
        read_settings(path)

"""What users of other frameworks met when they placed layers and recomputation."""

import pytest

from evenload import EvenloadError, LayerSetting
from evenload.dialects.ranges import read_ranges
from evenload.plan.layout import Layout
from evenload.plan.policy import Policy, counts, first_layers, recompute_units


def test_layers_that_do_not_divide_are_refused_or_balanced_but_never_lost() -> None:
    """NVIDIA/Megatron-LM#1304: 30 layers on 4 stages became 4 x 7."""
    with pytest.raises(EvenloadError, match="must sum to 2") as raised:
        LayerSetting(30, pp=4)
    assert raised.value.fix == "offset: [0, 1, 1, 0] works"
    setting = LayerSetting(30, pp=4, offset=[0, 1, 1, 0])
    assert setting.layer_list == [[7, 8, 8, 7]]
    assert [layer for _, _, layers in setting.layout.chunks() for layer in layers] == list(range(30))
    assert Layout.even(30, pp=4) == setting.layout


def test_a_short_last_stage_has_its_offset() -> None:
    """radixark/miles#1102: 61 layers with 13 on the last of 4 stages, not the extra ones."""
    layout = Layout.from_counts([16, 16, 16, 13])
    assert layout.num_layers == 61
    assert layout.offsets() == ((1, 1, 1, -2),)
    assert LayerSetting(61, pp=4, offset=[1, 1, 1, -2]).layer_list == [[16, 16, 16, 13]]


@pytest.mark.parametrize("num_layers", range(5, 41))
def test_an_offset_that_only_moves_layers_needs_an_even_number(num_layers: int) -> None:
    """MindFormers' performance guide: [-2, 1, 1, 0] relieves the first of 4 stages."""
    if num_layers % 4 == 0:
        share = num_layers // 4
        table = LayerSetting(num_layers, pp=4, offset=[-2, 1, 1, 0]).layer_list
        assert table == [[share - 2, share + 1, share + 1, share]]
    else:
        with pytest.raises(EvenloadError, match="the offset sums to 0"):
            LayerSetting(num_layers, pp=4, offset=[-2, 1, 1, 0])


def test_the_last_unit_of_uniform_recompute_is_as_short_as_it_must_be() -> None:
    """NVIDIA/Megatron-LM#3562 and #1807: 24 layers in groups of 7 ran out of the list."""
    assert [len(unit) for unit in recompute_units(24, 7)] == [7, 7, 7, 3]
    assert recompute_units(24, 7)[-1] == range(21, 24)


def test_uniform_recompute_of_one_layer_takes_all_of_them_and_block_only_the_first() -> None:
    """NovaSky-AI/SkyRL#368: uniform with 1 was taken for a single chunk."""
    layout = Layout.even(8, pp=2)
    assert [len(unit) for unit in recompute_units(8, 1)] == [1] * 8
    assert first_layers(((1, 1),), layout) == {0, 4}


def test_the_documented_tables_are_reproduced() -> None:
    """MindFormers r1.5, "Offset and recompute"."""
    setting = LayerSetting(
        48,
        pp=5,
        pp_interleave_num=2,
        offset=[[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]],
        recompute=[[2, 1, 0, 0, 0], [1, 0, 0, 0, 0]],
        select_recompute={r"feed_forward\.w1\.activation\.silu": True, r"feed_forward\.w3\.matmul": [2, 1, 0, 0, 0]},
    )
    assert setting.layer_list == [[4, 5, 5, 5, 5], [5, 5, 5, 5, 4]]
    assert setting.layer_recompute == [[2, 1, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert setting.select_recompute == {
        r"feed_forward\.w1\.activation\.silu": [[4, 5, 5, 5, 5], [5, 5, 5, 5, 4]],
        r"feed_forward\.w3\.matmul": [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]],
    }


def test_the_recomputed_layers_of_a_stage_are_its_first() -> None:
    """mindspore-lab/mindformers configs/glm4/finetune_glm4_9b.yaml."""
    setting = LayerSetting(40, pp=4, offset=[-1, 0, 2, -1], recompute=[6, 3, 2, 3])
    assert setting.layer_list == [[9, 10, 12, 9]]
    assert setting.layer_recompute == [[6, 3, 2, 3]]
    assert setting.policy.full == {*range(6), *range(9, 12), *range(19, 21), *range(31, 34)}


def test_rows_of_counts_stay_as_written_where_they_fit() -> None:
    """mindspore-ai/mindformers configs/telechat3/pretrain_telechat3_36b.yaml."""
    setting = LayerSetting(64, pp=2, pp_interleave_num=2, recompute=[[14, 14], [14, 14]])
    assert setting.layer_list == [[16, 16], [16, 16]]
    assert setting.layer_recompute == [[14, 14], [14, 14]]
    assert setting.notices == ()


def test_a_missing_offset_says_what_it_must_sum_to_and_one_that_works() -> None:
    """61 layers on 8 stages with 2 interleaves: a common shape with no even split."""
    with pytest.raises(EvenloadError) as raised:
        LayerSetting(61, pp=8, pp_interleave_num=2)
    assert "must sum to 13" in raised.value.fact
    offset = [[0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0]]
    assert str(offset) in raised.value.fix
    assert LayerSetting(61, pp=8, pp_interleave_num=2, offset=offset).layout.num_layers == 61


def test_a_count_above_its_chunk_is_taken_as_all_of_it_and_said() -> None:
    """MindFormers' performance guide, 1024 devices: 16 stages, 3 interleaves, one count of 2 for a chunk of 1 layer."""
    offset = [[-1] + [0] * 15, [-1] + [0] * 15, [0] * 14 + [1, 1]]
    rows = [[1] + [2] * 15, [2] * 16, [2] * 14 + [3, 1]]
    setting = LayerSetting(96, pp=16, pp_interleave_num=3, offset=offset, select_recompute=rows)
    assert setting.layer_list == [[1] + [2] * 15, [1] + [2] * 15, [2] * 14 + [3, 3]]
    for table in setting.select_recompute.values():
        assert table == [rows[0], [1] + [2] * 15, rows[2]]
    (notice,) = setting.notices
    assert notice.fact == "[1][0] asks for 2 layers, the chunk has 1: all of them are taken"
    assert notice.where == "$.select_recompute"


def test_ranges_of_layers_over_an_even_split_land_on_the_right_ranks() -> None:
    """MindFormers r2.0 names modules and ranges of layers instead of counts."""
    layout = Layout.even(16, pp=2, interleave=2)
    assert layout.table == ((4, 4), (4, 4))
    assert [layer for layer, stage in enumerate(layout.stages_of_layers()) if stage == 0] == [*range(4), *range(8, 12)]
    policy = Policy(
        select={
            "attention": read_ranges(["0-15"], 16, where="$"),
            "mlp": read_ranges(["0-9"], 16, where="$"),
        }
    )
    assert counts(policy.select["attention"], layout) == ((4, 4), (4, 4))
    assert counts(policy.select["mlp"], layout) == ((4, 4), (2, 0))
    assert policy.for_layer(9).select == ("attention", "mlp")
    assert policy.for_layer(10).select == ("attention",)

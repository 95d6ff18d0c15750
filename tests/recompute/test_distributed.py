"""Two processes on gloo: data, sharded and tensor parallel training, and every switch about communication."""

from __future__ import annotations

import pytest
from tests.processes import by_scenario, together
from tests.recompute import ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What every scenario found, for both ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    return by_scenario(together(ranks.main, ranks.RANKS, folder, str(folder), limit=500))


def exact(result) -> None:
    """Gradients to the bit, bytes as predicted, nothing left to wait for, every forward followed."""
    assert result["same"] == [True, True, True]
    assert result["freed"] == result["predicted"]
    assert result["unwaited"] == 0
    assert all("kept" not in served for served in result["served"])


@pytest.mark.parametrize(
    "name", ["ddp_llama", "ddp_toy", "fsdp_llama", "fsdp_toy", "fsdp_mixed_precision", "fsdp_inside_layers"]
)
def test_data_parallel_training(results, name):
    for rank in results(name):
        for result in rank:
            exact(result)
            assert result["freed"] > 0
            assert sum(result["again"].values()) > 0
            assert result["before"] == result["after"]


def test_sharding_may_come_after_recomputation(results):
    for rank in results("fsdp_after_apply"):
        assert rank["same"]
        assert rank["freed"] == rank["predicted"] > 0


def test_parameters_are_gathered_again_or_stay_gathered(results):
    for rank in results("optimizer_comm"):
        for first, result in rank.items():
            gathers = {name: result[name]["after"]["_allgather_base_"] for name in ("again", "kept", "as it was")}
            assert gathers == {"again": 7, "kept": 4, "as it was": 7 if first else 4}
            assert result["restored"] == result["plain"]
            assert all(result[name]["same"] == [True] * 3 for name in gathers)
            assert result["again"]["held"] < result["kept"]["held"]


def test_backward_in_parts_runs_no_layer_again_as_a_whole(results):
    for rank in results("zero_bubble"):
        for result in rank.values():
            assert result["same"]
            assert result["calls"] == (8, 8)  # two layers, four micro-batches
            assert result["freed"] > 0
            for served in result["served"]:
                assert served in ({"recorded": 1, "hooks": 7}, {"compared": 1, "hooks": 7})


def test_tensor_parallel_training(results):
    for rank in results("tensor_parallel"):
        for (family, _), rows in rank.items():
            for result in rows:
                exact(result)
                assert result["freed"] > 0
                assert sum(result["again"].values()) > 0
            default, norms, _, everything = rows
            assert default["before"] == default["after"] == norms["after"]
            if family == "llama":  # nothing in the toy needs what its collective brings
                assert sum(everything["after"].values()) > sum(everything["before"].values())


def test_tensor_parallel_plans_from_fake_tensors(results):
    for rank in results("tensor_parallel_on_fake_tensors"):
        for result in rank.values():
            exact(result)
            assert result["equal"]


def test_communication_is_selected_and_excluded(results):
    gathered = 2 * 32 * 64 * 4
    for rank in results("select_comm"):
        for result in rank.values():
            exact(result)
        gathers = {name: result["after"].get("all_gather_into_tensor", 0) for name, result in rank.items()}
        assert rank["default"]["before"]["all_gather_into_tensor"] == 8
        assert gathers["default"] == gathers["with norms"] == 12
        assert gathers["excluded"] == 10
        assert gathers["all excluded"] == gathers["select"] == 8
        assert rank["default"]["freed"] == 4 * gathered
        assert rank["excluded"]["freed"] == 2 * gathered
        assert rank["all excluded"]["freed"] == 0
        assert rank["with norms"]["freed"] >= rank["default"]["freed"] + rank["select"]["freed"]
        assert rank["no sequence parallelism"]["declined"] == ["no collective sends what it makes"] * 2


def test_a_recomputed_layer_keeps_what_collectives_brought(results):
    for rank in results("mp_comm"):
        for result in rank.values():
            plain = result.pop("plain")
            for one in result.values():
                assert one["same"] == [True] * 3
                assert one["unwaited"] == 0
            exact(result["engine"])
            exact(result["kept"])
            total = {name: sum(one["after"].values()) for name, one in result.items()}
            before = sum(result["kept"]["before"].values())
            assert total["kept"] == before
            assert before < total["engine"] <= total["again"]
            assert before <= total["excluded"] < total["engine"] or total["excluded"] == total["engine"]
            assert result["engine"]["kept"] <= result["again"]["kept"] < result["kept"]["kept"] < plain


def test_the_input_of_a_recomputed_layer_is_kept_in_slices(results):
    whole = 2 * 32 * 64 * 4
    for rank in results("slice_activation"):
        for sequence, result in rank.items():
            assert result["whole"]["same"] == result["sliced"]["same"] == [True] * 3
            saved = result["whole"]["kept"] - result["sliced"]["kept"]
            if sequence:
                assert saved == 0
                assert "sequence parallelism" in result["sliced"]["notices"][0]
            else:
                assert saved == 2 * whole // 2
                assert not result["sliced"]["notices"]
                gathers = result["sliced"]["after"].get("_allgather_base_", 0)
                assert gathers == 2

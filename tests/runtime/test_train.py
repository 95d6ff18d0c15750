"""`evenload train` in two processes: what is learned, how it stops, how it goes on, how it fails."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
from tests.runtime.running import CONFIG, Run, losses, wait_for, write_plan

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
OWN = ("--implementation", "reference", "--learning-rate", "0.003")
POLICY = r"{full: '0', select: {'mlp\.mul': 1-2, 'mlp\.act_fn\.silu': 1-2}}"


def test_a_plan_changes_nothing_of_what_is_learned_from_real_text(tmp_path):
    """200 steps on the documents of this repository: uneven, interleaved, recomputed on two ranks, and on one."""
    documents = [str(ROOT / "README.md"), *map(str, sorted((ROOT / "docs").glob("*.md")))]
    sizes = {"micro_batch": 2, "micro_batches": 4, "seq": 64}
    under = write_plan(tmp_path, [[1, 3], [1, 0]], policy=POLICY, schedule="interleaved_1f1b", **sizes)
    alone = write_plan(tmp_path, [5], "alone.yaml", **sizes)
    common = ("--steps", 200, *OWN, "--warmup", 20, "--decay", "cosine", "--log-every", 50)
    common = (*common, *(word for document in documents for word in ("--data", document)))
    runs = [
        Run(2, tmp_path, under, *common, "--log-file", "under.jsonl"),
        Run(1, tmp_path, alone, *common, "--log-file", "alone.jsonl"),
    ]
    for run in runs:
        run.wait()
        assert set(run.codes) == {0}, run.outputs
    first, second = losses(tmp_path / "under.jsonl"), losses(tmp_path / "alone.jsonl")
    assert first == second  # to the bit
    assert len(first) == 200
    assert first[1] > 5.4
    assert first[200] < 3.2
    assert "step 200  loss" in runs[0].outputs[0]
    lines = [line.split() for line in runs[0].outputs[0].splitlines()]
    assert [line[0] for line in lines if line[-1] == "none"] == ["0", "1"]  # measured peaks are the predicted ones
    assert runs[0].outputs[1] == ""


def test_a_killed_run_goes_on_with_the_same_losses_also_under_another_plan(tmp_path):
    plan = write_plan(tmp_path, [2, 3])
    other = write_plan(tmp_path, [[1, 1], [2, 1]], "other.yaml", schedule="zbv", policy="{full: 0-1}")
    common = ("--data", "text.txt", "--steps", 24, *OWN, "--accumulation", 2, "--clip", "1.0")
    whole = Run(2, tmp_path, plan, *common, "--log-file", "whole.jsonl").wait()
    assert whole.codes == [0, 0], whole.outputs
    saving = ("--checkpoints", "saved", "--checkpoint-every", 4, "--log-file", "killed.jsonl")
    killed = Run(2, tmp_path, plan, *common, *saving)
    wait_for(tmp_path / "killed.jsonl", '"step":9')
    for process in killed.processes:
        process.kill()
    killed.wait()
    half = Run(2, tmp_path, plan, *common, *saving, "--resume")
    wait_for(tmp_path / "killed.jsonl", '"step":16')
    half.processes[1].send_signal(signal.SIGTERM)
    half.wait()
    assert half.codes == [0, 0], half.outputs
    assert "resumed after step 8" in half.outputs[0]
    assert "stopped by SIGTERM after step" in half.outputs[0]
    rest = Run(2, tmp_path, other, *common, *saving, "--resume").wait()
    assert rest.codes == [0, 0], rest.outputs
    found, expected = losses(tmp_path / "killed.jsonl"), losses(tmp_path / "whole.jsonl")
    assert found.keys() == expected.keys()
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-6)
    kept = sorted(path.name for path in (tmp_path / "saved").glob("step-*"))
    assert len(kept) == 2
    assert kept[-1] == "step-00000024"


def test_a_rank_that_dies_ends_the_run_on_all(tmp_path):
    plan = write_plan(tmp_path, [2, 3])
    run = Run(2, tmp_path, plan, "--data", "text.txt", "--steps", 100000, *OWN, "--log-file", "log.jsonl")
    wait_for(tmp_path / "log.jsonl", '"step":3')
    run.processes[1].kill()
    run.wait(60)
    assert run.codes == [1, -9]
    assert "error: rank 0 lost another rank" in run.outputs[0]
    assert "Traceback" not in run.outputs[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--data", "none.txt"), "none.txt: there is no such file"),
        (("--data", "high.bin"), "the data has the token 999, and the model's vocabulary has 256"),
        (("--data", "text.txt", "--layers", "model.layer"), "did you mean 'model.layers'"),
        (("--data", "text.txt", "--micro-batches", "1"), "1f1b cannot run so"),
        (("--data", "text.txt", "--log-file", "text.txt/log.jsonl"), "cannot write the log"),
    ],
)
def test_a_mistake_ends_all_ranks_with_one_voice(tmp_path, arguments, says):
    np.full(1000, 999, dtype="<u2").tofile(tmp_path / "high.bin")
    plan = write_plan(tmp_path, [2, 3])
    run = Run(2, tmp_path, plan, "--steps", 2, "--implementation", "reference", *arguments).wait(120)
    assert run.codes == [2, 2], run.outputs
    assert "\n".join(run.outputs).count("error:") == 1
    assert says in run.outputs[0]
    assert "Traceback" not in "".join(run.outputs)


def test_another_number_of_processes_is_refused_at_once(tmp_path):
    plan = write_plan(tmp_path, [2, 1, 2], micro_batches=3)
    run = Run(2, tmp_path, plan, "--data", "text.txt").wait(60)
    assert run.codes == [2, 2]
    assert "the plan is for 3 processes, and 2 run" in run.outputs[0]
    assert "torchrun --nproc-per-node 3" in run.outputs[0]
    assert run.outputs[1] == ""


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    first, second = write_plan(tmp_path, [2]), write_plan(tmp_path, [2, 3], "two.yaml")
    common = ("--data", "text.txt", "--steps", 2, *OWN, "--checkpoints", "saved")
    assert Run(1, tmp_path, first, *common).wait().codes == [0]
    run = Run(2, tmp_path, second, *common, "--resume").wait(120)
    assert run.codes == [2, 2], run.outputs
    assert "the checkpoint has no 'model.layers." in "".join(run.outputs)
    assert "".join(run.outputs).count("error:") == 1
    assert CONFIG["num_hidden_layers"] == 5


def test_replicas_and_divided_layers_train_and_go_on_from_each_others_checkpoints(tmp_path):
    replicas = write_plan(tmp_path, [2, 3], dp=2, zero=3, policy="{full: 0-1}")
    divided = write_plan(tmp_path, [3, 2], "divided.yaml", tp=2, sequence_parallel=True, micro_batches=4)
    alone = write_plan(tmp_path, [5], "alone.yaml", micro_batches=4)
    common = ("--data", "text.txt", *OWN, "--checkpoints", "saved", "--log-file", "log.jsonl", "--clip", "1.0")
    first = Run(4, tmp_path, replicas, *common, "--steps", 3).wait()
    assert first.codes == [0] * 4, first.outputs
    second = Run(4, tmp_path, divided, *common, "--steps", 6, "--resume").wait()
    assert second.codes == [0] * 4, second.outputs
    whole = Run(
        1, tmp_path, alone, "--data", "text.txt", *OWN, "--log-file", "whole.jsonl", "--clip", "1.0", "--steps", 6
    )
    assert whole.wait().codes == [0], whole.outputs
    found, expected = losses(tmp_path / "log.jsonl"), losses(tmp_path / "whole.jsonl")
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-5)

"""Kernels make other memory than the shapes of their results say: a dry run does too, or says that it cannot."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.record.events import signed_events
from tests.record.truth import counted_twice
from torch import nn

import evenload
from evenload.ledger.curve import curve
from evenload.record.kernels import onednn_lstm_workspace
from evenload.record.targets import find_target
from evenload.report.dryrun import DryRun, as_json, as_text

torch.set_num_threads(1)


class Applied(nn.Module):
    """A function of what a layer returns."""

    def __init__(self, layer, function):
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, *inputs):
        return self.function(self.layer(*inputs))


def loss_of(criterion, target=torch.ones):
    return lambda: Applied(nn.Sequential(nn.Linear(16, 32), nn.Sigmoid()), lambda x: criterion(x, target(x.shape)))


def sequence(*, width=64, dtype=torch.float32, batch_first=False):
    shape = (8, 20, width) if batch_first else (20, 8, width)
    return lambda: (torch.zeros(shape, dtype=dtype),)


def rows(*shape):
    return lambda: (torch.zeros(shape),)


def bags(**options):
    return lambda: nn.EmbeddingBag(50, 16, **options)


def indices():
    return torch.zeros(40, dtype=torch.int64), torch.arange(0, 40, 10)


def turned(*shape):
    """Numbers that lie in memory in another order than that of their dimensions."""
    return lambda: (torch.zeros(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2),)


def mixed(layer):
    """A layer with fp32 weights after a product of 16-bit numbers, as under autocast."""
    return lambda: nn.Sequential(nn.Linear(16, 16), Applied(nn.Identity(), torch.Tensor.bfloat16), layer())


class Turning(nn.Module):
    """A layer between products, whose input lies in another order."""

    def __init__(self, function):
        super().__init__()
        self.before, self.function, self.after = nn.Linear(16, 8), function, nn.Linear(16, 4)

    def forward(self, x):
        return self.after(self.function(self.before(x).transpose(-1, -2)))


IMAGE = rows(2, 3, 12, 12)
CASES = {
    "LSTM": (lambda: nn.LSTM(64, 96), sequence()),
    "LSTM of several layers": (lambda: nn.LSTM(64, 96, 3, dropout=0.1), sequence()),
    "LSTM in both directions": (lambda: nn.LSTM(64, 96, 2, bidirectional=True), sequence()),
    "LSTM, the batch first": (lambda: nn.LSTM(64, 96, 2, batch_first=True), sequence(batch_first=True)),
    "LSTM without biases": (lambda: nn.LSTM(64, 96, bias=False), sequence()),
    "LSTM with projections": (lambda: nn.LSTM(64, 96, proj_size=32), sequence()),
    "LSTM in bfloat16": (lambda: nn.LSTM(64, 96, 2).bfloat16(), sequence(dtype=torch.bfloat16)),
    "LSTM in float64": (lambda: nn.LSTM(16, 24).double(), sequence(width=16, dtype=torch.float64)),
    "GRU": (lambda: nn.GRU(16, 24, 2), sequence(width=16)),
    "RNN": (lambda: nn.RNN(16, 24, 2), sequence(width=16)),
    "mean of bags": (bags(), indices),
    "sums of bags": (bags(mode="sum"), indices),
    "maxima of bags": (bags(mode="max"), indices),
    "bags with a last offset": (bags(mode="sum", include_last_offset=True), indices),
    "sparse gradients of bags": (bags(mode="sum", sparse=True), indices),
    "sparse gradients": (lambda: nn.Embedding(50, 16, sparse=True), lambda: indices()[:1]),
    "statistics of the input": (lambda: nn.BatchNorm1d(3), rows(4, 3, 50)),
    "layer norm in two types": (mixed(lambda: nn.LayerNorm(16)), rows(4, 8, 16)),
    "layer norm in two types without a bias": (mixed(lambda: nn.LayerNorm(16, bias=False)), rows(4, 8, 16)),
    "group norm in two types": (mixed(lambda: nn.GroupNorm(2, 8)), rows(4, 8, 16)),
    "batch norm in two types": (mixed(lambda: nn.BatchNorm1d(8)), rows(4, 8, 16)),
    "layer norm, turned": (lambda: Turning(nn.LayerNorm(16)), rows(4, 16, 16)),
    "batch norm, turned": (lambda: Turning(nn.BatchNorm1d(8)), rows(4, 16, 16)),
    "softplus, turned": (lambda: Turning(nn.functional.softplus), rows(4, 16, 16)),
    "softmax, turned": (lambda: Turning(lambda x: x.log_softmax(-1)), rows(4, 16, 16)),
    "dropout, turned": (lambda: Turning(nn.Dropout(0.5)), rows(4, 16, 16)),
    "sigmoid, turned": (lambda: Turning(nn.functional.logsigmoid), rows(4, 16, 16)),
    "powers, turned": (lambda: Turning(lambda x: 2**x), rows(4, 16, 16)),
    "squares of what is turned": (
        lambda: Applied(Turning(nn.Identity()), lambda x: nn.functional.mse_loss(x, x.detach() + 1)),
        turned(4, 16, 16),
    ),
    "squares": (loss_of(nn.MSELoss()), rows(8, 16)),
    "squares, summed": (loss_of(nn.MSELoss(reduction="sum")), rows(8, 16)),
    "smooth distances": (loss_of(nn.SmoothL1Loss()), rows(8, 16)),
    "margins": (loss_of(nn.SoftMarginLoss()), rows(8, 16)),
    "entropy": (loss_of(nn.BCELoss()), rows(8, 16)),
    "no reduction": (loss_of(nn.MSELoss(reduction="none")), rows(8, 16)),
    "columns of an image": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Unfold(3)), IMAGE),
    "few columns of an image": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Unfold(1, stride=4)), IMAGE),
    "image of columns": (lambda: nn.Sequential(nn.Linear(9, 9), nn.Fold((8, 8), 3, stride=2)), rows(2, 18, 9)),
}


def step(model, batch):
    returned = model(*batch)
    while isinstance(returned, tuple):
        returned = returned[0]
    (returned.sum() if returned.dim() else returned).backward()
    model.zero_grad()


def dry(build, inputs, device="cpu"):
    return evenload.dryrun(build, step, device=device, inputs=inputs)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", CASES)
def test_the_dry_run_is_the_real_run_event_for_event(name):
    build, inputs = CASES[name]
    model = build()
    with evenload.record(model=model) as recording:
        for _ in range(2):
            step(model, inputs())
    np.testing.assert_array_equal(signed_events(dry(build, inputs)), signed_events(recording.ledger))


@settings(max_examples=25, deadline=None)
@given(
    steps=st.integers(1, 30),
    batch=st.integers(1, 12),
    width=st.integers(1, 300),
    hidden=st.integers(1, 300) | st.sampled_from([256, 512]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_what_an_lstm_keeps_is_the_workspace_of_its_kernel(steps, batch, width, hidden, dtype):
    weights = [weight.detach() for weight in nn.LSTM(width, hidden, dtype=dtype).parameters()]
    states = (torch.zeros(batch, hidden, dtype=dtype) for _ in range(2))
    inputs = torch.zeros(steps, batch, width, dtype=dtype)
    layer = torch.ops.aten.mkldnn_rnn_layer
    workspace = layer(inputs, *weights, *states, False, [], 2, hidden, 1, True, False, False, True)[3]
    assert workspace.nbytes == onednn_lstm_workspace(
        steps=steps, batch=batch, width=width, hidden=hidden, size=dtype.itemsize
    )


def test_statistics_of_16_bit_numbers_are_fp32_on_an_accelerator():
    ledger = dry(lambda: nn.LayerNorm(16, dtype=torch.bfloat16), lambda: (torch.zeros(4, 8, 16).bfloat16(),), "cuda")
    made = ledger.allocations.nbytes[
        [ledger.operator(row) == "aten.native_layer_norm" for row in range(len(ledger.allocations))]
    ]
    assert made.tolist() == 2 * [4 * 8 * 16 * 2, 4 * 8 * 4, 4 * 8 * 4]


def test_without_gradients_an_lstm_keeps_no_workspace():
    def evaluate(model, batch):
        with torch.no_grad():
            model(*batch)

    build, inputs = CASES["LSTM"]
    model = build()
    with evenload.record(model=model) as recording:
        evaluate(model, inputs())
    ledger = evenload.dryrun(build, evaluate, device="cpu", inputs=inputs, steps=1)
    np.testing.assert_array_equal(signed_events(ledger), signed_events(recording.ledger))


def test_the_peak_of_an_lstm_is_the_one_that_the_profiler_sees_but_for_scratch_that_is_named():
    build, inputs = CASES["LSTM of several layers"]

    def run(_):
        model = build()
        for _ in range(2):
            step(model, inputs())

    run(None)  # what oneDNN makes once in a process is not the layer's
    truth, ledger = counted_twice(run).profiler_peak, dry(build, inputs)
    assert 0.8 * truth <= curve(ledger).peak <= truth
    (notice,) = shown(ledger, "cpu").notices
    assert "aten.mkldnn_rnn_layer, aten.mkldnn_rnn_layer_backward" in notice.fact


def shown(ledger, device):
    return DryRun(ledger=ledger, target=find_target(device), seconds=0.0, title="a model")


@pytest.mark.parametrize(
    ("layer", "device", "operator", "row"),
    [
        (lambda: nn.Conv2d(3, 8, 3), "cpu", "aten.convolution_backward", "scratch of a convolution"),
        (lambda: nn.ConvTranspose2d(3, 8, 3), "cuda", "aten.convolution_backward", "workspace of a convolution"),
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Upsample(None, 2)), "cpu", "aten.upsample_nearest2d", "resizing"),
    ],
)
def test_memory_that_kernels_ask_for_themselves_is_named_where_they_ran(layer, device, operator, row):
    run = shown(dry(layer, IMAGE, device), device)
    (notice,) = run.notices
    assert operator in notice.fact
    assert row in as_text(run)
    assert any(operator in one["operators"] for one in as_json(run)["not_seen"])
    plain = shown(dry(lambda: nn.Linear(4, 4), rows(2, 4), device), device)
    assert not plain.notices
    assert row not in as_text(plain)


@pytest.mark.parametrize(
    ("build", "count"),
    [
        (lambda: nn.LSTM(64, 96, 3, bidirectional=True, proj_size=32), 3),
        (lambda: nn.GRU(64, 96, 3, batch_first=True), 2),
        (lambda: nn.RNN(64, 96, 3, nonlinearity="relu", bias=False), 2),
    ],
)
def test_recurrent_layers_are_one_operator_on_an_accelerator(build, count):
    ledger = dry(build, sequence(), "cuda")
    made = [ledger.operator(row) for row in range(len(ledger.allocations))]
    assert made.count("aten._cudnn_rnn") == 2 * count
    gradients = sum(made.count(f"aten._cudnn_rnn_backward{end}") for end in ("", ".default"))
    assert gradients >= 2 * len(list(build().parameters()))
    (notice,) = shown(ledger, "cuda").notices
    assert "aten._cudnn_rnn" in notice.fact
    real = build()(*sequence()())[0]  # real tensors are nobody's dry run, not even beside one
    assert real.is_cpu
    assert real.grad_fn is not None

"""Adam of tables with sparse gradients. The oracles are torch's dense Adam, and one Adam for each row."""

import copy
import gc
import math

import pytest
import torch
from torch import Tensor, nn

from fastqt.engines import ops
from fastqt.nn import BagOfWords, StaticEmbedding, sparse_gradients
from fastqt.optim import Adam, AdamW, adam, replay
from tests.shared.tolerances import FLOAT64, relative

native = pytest.mark.skipif(ops.native_error is not None, reason=str(ops.native_error))
V, D = 300, 5
KINDS = {"adam": (Adam, torch.optim.Adam), "adamw": (AdamW, torch.optim.AdamW)}


class Training:
    """A table whose rows are read as by a Zipf law, and a dense layer, under an optimiser.

    A loss that is linear in the vectors has gradients that do not depend on the table, so that roundings do
    not grow from step to step.
    """

    def __init__(self, sparse: bool, dtype: torch.dtype = torch.float64, linear: bool = False) -> None:
        self.linear = linear
        draw = torch.Generator().manual_seed(0)
        vectors = torch.randn(V, D, generator=draw, dtype=torch.float64)
        self.model = nn.ModuleDict(
            {"table": StaticEmbedding(V, D, sparse=sparse), "layer": nn.Linear(D, D)}
        ).to(dtype)
        with torch.no_grad():
            self.model["table"].embedding.weight.copy_(vectors)
            self.model["layer"].weight.copy_(torch.randn(D, D, generator=draw))
            self.model["layer"].bias.zero_()

    @property
    def table(self) -> nn.Parameter:
        return self.model["table"].embedding.weight

    def differentiate(self, seed: int) -> Tensor:
        """Gradients over some powers of ten, so that eps is felt, of a loss by the vectors."""
        ids, offsets = batch(seed)
        size = 10.0 ** -(seed % 7)
        self.model.zero_grad()
        result = self.model["layer"](self.model["table"](ids, offsets))
        draw = torch.Generator().manual_seed(seed)
        loss = (size * torch.randn(result.shape, generator=draw) * result.pow(1 if self.linear else 3)).sum()
        loss.backward()
        return loss.detach()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = (V * torch.rand(12, generator=draw) ** 4).long()
    return ids, torch.tensor([0, 3, 3, 7])


def schedule(step: int) -> float:
    """A warm-up and then waves, with steps that do not learn at all."""
    return 0.0 if step in (60, 61) else min(1.0, (step + 1) / 20) * (0.6 + 0.4 * math.cos(step / 9))


def steps(training: Training, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * schedule(seed)
        training.differentiate(seed)
        optimizer.step()


@native
@pytest.mark.parametrize("rows", ["touched", "replayed"])
def test_a_step_in_float32_has_the_moments_of_float64(rows):
    """A second moment of 1 - beta2 for a rounded beta2 would be off by 1e-5."""
    draw = torch.Generator().manual_seed(0)
    table, values = torch.randn(2, V, D, generator=draw)
    ours, theirs = nn.Parameter(table.clone()), nn.Parameter(table.double())
    ours.grad = torch.sparse_coo_tensor(torch.arange(V)[None], values, (V, D))
    theirs.grad = values.double()
    optimizers = Adam([ours], lr=0.01, rows=rows), torch.optim.Adam([theirs], lr=0.01)
    for optimizer in optimizers:
        optimizer.step()
    of_ours, of_theirs = optimizers[0].state[ours], optimizers[1].state[theirs]
    for name in ("exp_avg", "exp_avg_sq"):
        moments = of_theirs[name]
        assert ((of_ours[name].double() - moments) / moments).abs().max() < 4e-7
    assert relative(ours.detach() - table, theirs.detach() - table) < 3e-5  # of differences of about 0.01


@native
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.8, 0.5), (0.95, 0.9), (0.0, 0.0)], ids=str)
def test_replayed_rows_are_those_of_dense_adam(kind, betas):
    """Over 500 steps with a schedule, in which rows miss from one step to all of them."""
    ours, theirs = Training(True, linear=True), Training(False, linear=True)
    options = {"betas": betas} | ({"weight_decay": 0.1} if kind == "adamw" else {})
    optimizer = KINDS[kind][0](ours.model.parameters(), rows="replayed", **options)
    dense = KINDS[kind][1](theirs.model.parameters(), **options)
    steps(ours, optimizer, range(500))
    steps(theirs, dense, range(500))

    state = optimizer.state[ours.table]
    missed = 500 - state["last"]
    assert int(missed.min()) == 0
    assert int(missed.max()) > 300
    assert missed.unique().numel() > 50
    optimizer.catch_up()
    for one, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert relative(one, other) < 10 * FLOAT64  # as many roundings again as steps
    for key in ("exp_avg", "exp_avg_sq"):
        assert relative(state[key], dense.state[theirs.table][key]) < 10 * FLOAT64


@native
def test_replayed_rows_in_float32_are_as_near_the_truth_as_dense_ones():
    exact, theirs, ours = (
        Training(sparse, dtype, linear=True)
        for sparse, dtype in ((False, torch.float64), (False, torch.float32), (True, torch.float32))
    )
    dense = torch.optim.Adam(exact.model.parameters()), torch.optim.Adam(theirs.model.parameters())
    optimizer = Adam(ours.model.parameters(), rows="replayed")
    for training, each in ((exact, dense[0]), (theirs, dense[1]), (ours, optimizer)):
        steps(training, each, range(500))
    optimizer.catch_up()
    errors = [relative(training.table.double(), exact.table) for training in (ours, theirs)]
    assert errors[0] < 2 * errors[1]
    assert errors[1] > 0


@native
@pytest.mark.parametrize("since", [5, 900, 3000])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.9), (0.8, 0.5)], ids=str)
def test_missed_steps_are_their_sum_to_the_last_digits(betas, since):
    """Of an element whose v is from far below eps² to far above it; the oracle adds the steps up exactly."""
    step, eps, (beta1, beta2) = 3300, 1e-8, betas
    v = 10.0 ** torch.arange(-20, 1, dtype=torch.float64).repeat(2, 1)
    table, m, last = torch.zeros_like(v), torch.ones_like(v), torch.tensor([since, step])
    rates = torch.ones(replay.WINDOW, 2, dtype=torch.float64)
    rates[:step, 0] = torch.arange(step) % 3  # some of which do not learn
    rates[:step, 1] = 1 - 1e-3 * rates[:step, 0]
    torch.ops.fastqt.replay_rows_(table, m, v.clone(), last, None, rates, step, *betas, eps, True)
    assert torch.equal(table[1], torch.zeros(21))

    for found, square in zip(table[0].tolist(), v[0].tolist(), strict=True):
        moves, keep = [], 1.0
        for s in range(step, since, -1):
            root = math.sqrt(square * beta2 ** (s - since) / (1 - beta2**s)) + eps
            moves.append(keep * float(rates[s - 1, 0]) * beta1 ** (s - since) / (1 - beta1**s) / root)
            keep *= float(rates[s - 1, 1])
        assert found == pytest.approx(-math.fsum(moves), rel=1e-14)


@native
def test_rows_are_brought_up_to_date_at_the_end_of_each_window(monkeypatch):
    monkeypatch.setattr(adam, "WINDOW", 8)
    ours, theirs = Training(True), Training(False)
    optimizer, dense = (
        AdamW(ours.model.parameters(), rows="replayed"),
        torch.optim.AdamW(theirs.model.parameters()),
    )
    steps(ours, optimizer, range(29))
    steps(theirs, dense, range(29))
    assert int(optimizer.state[ours.table]["last"].min()) == 24
    optimizer.catch_up()
    assert relative(ours.table, theirs.table) < FLOAT64
    optimizer.state[ours.table]["last"].fill_(3)
    with pytest.raises(RuntimeError, match=r"last: want 24\.\.29, got 3 for row 0"):
        optimizer.catch_up()
    optimizer.state[ours.table]["last"].fill_(29)  # as it must be to be deleted


@native
@pytest.mark.parametrize("read", ["eval", "state_dict", "load_state_dict", "forward", "up_to_date"])
def test_what_is_read_is_up_to_date(read):
    ours, theirs = Training(True), Training(False)
    optimizer, dense = (
        Adam(ours.model.parameters(), rows="replayed"),
        torch.optim.Adam(theirs.model.parameters()),
    )
    steps(ours, optimizer, range(20))
    steps(theirs, dense, range(20))
    before = ours.table.detach().clone()
    assert relative(before, theirs.table) > 1e-6
    everything = torch.arange(V), torch.arange(V)

    if read == "eval":
        ours.model.eval()
        assert relative(ours.table, theirs.table) < FLOAT64
    elif read == "state_dict":
        stored = ours.model.state_dict()
        assert relative(stored["table.embedding.weight"], theirs.table) < FLOAT64
    elif read == "load_state_dict":
        for training in (ours, theirs):
            training.model.load_state_dict({name: x + 1 for name, x in training.model.state_dict().items()})
    elif read == "forward":
        assert relative(ours.model["table"](*everything), theirs.table) < FLOAT64
    else:
        lag = optimizer.state[ours.table]["last"].clone()
        with optimizer.up_to_date():
            assert relative(ours.model.eval()["table"](*everything), theirs.table) < FLOAT64
            assert relative(ours.model.state_dict()["table.embedding.weight"], theirs.table) < FLOAT64
        assert torch.equal(ours.table, before)
        assert torch.equal(optimizer.state[ours.table]["last"], lag)
    ours.model.train()
    steps(ours, optimizer, range(20, 40))
    steps(theirs, dense, range(20, 40))
    optimizer.catch_up()
    assert relative(ours.table, theirs.table) < FLOAT64


@native
def test_evaluations_in_a_context_change_no_bit():
    plain, evaluated = Training(True), Training(True)
    optimizers = [Adam(x.model.parameters(), rows="replayed") for x in (plain, evaluated)]
    for seed in range(30):
        steps(plain, optimizers[0], range(seed, seed + 1))
        steps(evaluated, optimizers[1], range(seed, seed + 1))
        with optimizers[1].up_to_date():
            evaluated.model["table"](torch.arange(V), torch.arange(V))
        with optimizers[1].ignoring_reads():
            evaluated.model.state_dict()
    assert torch.equal(plain.table, evaluated.table)
    assert torch.equal(optimizers[0].state[plain.table]["last"], optimizers[1].state[evaluated.table]["last"])


@pytest.mark.parametrize("rows", ["all", "replayed", "touched"])
def test_a_stored_training_goes_on_with_the_same_bits(rows, tmp_path):
    whole, parts = Training(True), Training(True)
    first = AdamW(whole.model.parameters(), rows=rows)
    steps(whole, first, range(15))
    torch.save({"model": whole.model.state_dict(), "optimizer": first.state_dict()}, tmp_path / "stored")
    stored = torch.load(tmp_path / "stored")
    parts.model.load_state_dict(stored["model"])
    second = AdamW(parts.model.parameters(), rows=rows)
    second.load_state_dict(stored["optimizer"])
    for training, optimizer in ((whole, first), (parts, second)):
        steps(training, optimizer, range(15, 40))
        optimizer.catch_up()
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rows", ["all", "replayed"])
def test_a_state_is_that_of_torch_and_back(rows):
    """A training goes from torch's dense Adam to ours and back, and stays that of torch's."""
    moving, dense = Training(True), Training(False)
    theirs = torch.optim.Adam(dense.model.parameters())
    ours = Adam(moving.model.parameters(), rows=rows)
    steps(dense, theirs, range(10))
    moving.model.load_state_dict(dense.model.state_dict())
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert ours.param_groups[0]["rows"] == rows
    steps(moving, ours, range(10, 25))
    back = Training(False)
    back.model.load_state_dict(moving.model.state_dict())
    last = torch.optim.Adam(back.model.parameters())
    last.load_state_dict(ours.state_dict())
    steps(back, last, range(25, 35))
    steps(dense, theirs, range(10, 35))
    assert relative(back.table, dense.table) < FLOAT64


@native
@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_an_optimiser_that_is_deleted_leaves_no_row_behind(in_a_cycle):
    """As one of a function that returns the model alone, or of a trainer whose objects know each other."""
    ours, dense = Training(sparse=True, linear=True), Training(sparse=False, linear=True)
    steps(dense, torch.optim.Adam(dense.model.parameters()), range(20))
    optimizer = Adam(ours.model.parameters(), rows="replayed")
    steps(ours, optimizer, range(20))
    assert relative(ours.table, dense.table) > FLOAT64
    if in_a_cycle:
        optimizer.trainer = [optimizer]
    del optimizer
    gc.collect()
    assert relative(ours.table, dense.table) < FLOAT64


@native
def test_an_optimiser_takes_tables_that_are_up_to_date():
    """The one before is told so, and moves nothing when it is deleted later."""
    ours, dense = Training(sparse=True, linear=True), Training(sparse=False, linear=True)
    steps(dense, torch.optim.Adam(dense.model.parameters()), range(20))
    first = Adam(ours.model.parameters(), rows="replayed")
    steps(ours, first, range(20))
    second = Adam(ours.model.parameters(), rows="replayed")
    assert relative(ours.table, dense.table) < FLOAT64

    steps(dense, torch.optim.Adam(dense.model.parameters()), range(20, 40))
    steps(ours, second, range(20, 40))
    behind = ours.table.detach().clone()
    del first
    gc.collect()
    assert torch.equal(ours.table, behind)
    second.catch_up()
    assert relative(ours.table, dense.table) < FLOAT64


@native
def test_a_replayed_training_without_the_extension_goes_on(monkeypatch):
    """What lags is then brought up to date by torch, and all rows move in each step."""
    ours, theirs = Training(True), Training(False)
    optimizer, dense = (
        AdamW(ours.model.parameters(), rows="replayed"),
        torch.optim.AdamW(theirs.model.parameters()),
    )
    steps(ours, optimizer, range(20))
    for module in (sparse_gradients, adam, replay):
        monkeypatch.setattr(module, "is_native", lambda tensor: False)
    with optimizer.up_to_date():
        steps(theirs, dense, range(20))
        assert relative(ours.table, theirs.table) < FLOAT64
    steps(ours, optimizer, range(20, 40))
    steps(theirs, dense, range(20, 40))
    assert "last" not in optimizer.state[ours.table]
    assert relative(ours.table, theirs.table) < FLOAT64


@pytest.mark.parametrize("path", ["native", "torch"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_touched_row_takes_the_steps_of_its_own_adam(kind, decay, path, monkeypatch):
    """The oracle has a torch optimiser for each row, which takes a step only when the row has a gradient."""
    if path == "torch":
        monkeypatch.setattr(adam, "is_native", lambda tensor: False)
    elif ops.native_error is not None:
        pytest.skip(ops.native_error)
    training = Training(True)
    ours, theirs = KINDS[kind]
    options = {"lr": 0.01, "weight_decay": decay, "maximize": decay > 0}
    optimizer = ours(training.model.parameters(), rows="touched", **options)
    rows = [nn.Parameter(row.clone()) for row in training.table.detach()]
    of_rows = [theirs([row], **options) for row in rows]
    counts = torch.zeros(V)
    for seed in range(40):
        training.differentiate(seed)
        touched, values = sparse_gradients.distinct_rows(training.table.grad)
        for row, value in zip(touched.tolist(), values, strict=True):
            rows[row].grad = value.clone()
            of_rows[row].step()
        counts[touched] += 1
        optimizer.step()
    assert relative(training.table, torch.stack(list(rows))) < FLOAT64
    assert torch.equal(optimizer.state[training.table]["step"], counts)
    assert counts.unique().numel() > 5


def test_the_protocol_of_torch():
    """Groups with options of their own, closures, schedules, hooks, zero_grad, gradients that stay."""
    training = Training(True)
    optimizer = AdamW(
        [
            {"params": training.model["table"].parameters(), "rows": "replayed", "weight_decay": 0.0},
            {"params": training.model["layer"].parameters(), "lr": 0.5},
        ],
        lr=0.1,
    )
    assert [group["rows"] for group in optimizer.param_groups] == ["replayed", "all"]
    torch.optim.Adam([nn.Parameter(torch.zeros(1))])  # from now on torch wraps its step for hooks
    hooked = []
    optimizer.register_step_pre_hook(lambda *_: hooked.append(1))
    plan = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses = []
    for _ in range(3):
        losses.append(float(optimizer.step(lambda: training.differentiate(7))))
        plan.step()
    assert losses[2] < losses[0]
    assert len(hooked) == 3
    assert training.table.grad.is_sparse
    optimizer.zero_grad()
    assert training.table.grad is None
    before = training.table.detach().clone()
    optimizer.step()  # without gradients
    assert torch.equal(training.table, before)
    again = copy.deepcopy(optimizer)
    assert again.param_groups[0]["rows"] == "replayed"


def test_a_table_that_no_module_reads_moves_in_each_step():
    """Its forward pass brings nothing up to date, so that nothing may lag."""
    ours, theirs = (nn.Embedding(V, D, sparse=sparse).double() for sparse in (True, False))
    theirs.load_state_dict(ours.state_dict())
    optimizer, dense = Adam(ours.parameters(), rows="replayed"), torch.optim.Adam(theirs.parameters())
    for seed in range(10):
        for module, each in ((ours, optimizer), (theirs, dense)):
            each.zero_grad()
            module(batch(seed)[0]).pow(3).sum().backward()
            each.step()
        assert relative(ours.weight, theirs.weight) < FLOAT64
    assert "last" not in optimizer.state[ours.weight]


@native
def test_two_encoders_of_one_table_and_padded_sentences():
    """A step reads a table twice, and a row of it twice."""
    ours, theirs = (BagOfWords(V, D, sparse=sparse).double() for sparse in (True, False))
    theirs.load_state_dict(ours.state_dict())
    optimizer, dense = Adam(ours.parameters(), rows="replayed"), torch.optim.Adam(theirs.parameters())
    for seed in range(30):
        tokens, lengths = batch(seed)[0].view(3, 4), torch.tensor([4, 0, 2])
        for encoder, each in ((ours, optimizer), (theirs, dense)):
            each.zero_grad()
            (encoder(tokens, lengths) * encoder(tokens.flip(0), lengths)).sum().backward()
            each.step()
    assert "last" in optimizer.state[ours.embedding.weight]
    optimizer.catch_up()
    assert relative(ours.embedding.weight, theirs.embedding.weight) < FLOAT64


@native
def test_other_decay_rates_begin_with_the_step_that_has_them():
    ours, theirs = Training(True), Training(False)
    optimizer, dense = (
        Adam(ours.model.parameters(), rows="replayed"),
        torch.optim.Adam(theirs.model.parameters()),
    )
    for betas, seeds in (((0.9, 0.999), range(20)), ((0.5, 0.9), range(20, 40))):
        for training, each in ((ours, optimizer), (theirs, dense)):
            each.param_groups[0]["betas"] = betas
            steps(training, each, seeds)
    optimizer.catch_up()
    assert relative(ours.table, theirs.table) < FLOAT64


@native
def test_the_number_of_threads_changes_no_bit():
    tables = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            draw = torch.Generator().manual_seed(0)
            embedding = StaticEmbedding(3000, 64, sparse=True)
            with torch.no_grad():
                embedding.embedding.weight.copy_(torch.randn(3000, 64, generator=draw))
            optimizer = AdamW(embedding.parameters(), rows="replayed")
            for _ in range(6):
                ids = torch.randint(0, 3000, (4000,), generator=draw)
                embedding(ids, torch.arange(0, 4000, 10)).pow(3).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.catch_up()
            tables.append(embedding.embedding.weight.detach().clone())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(table, tables[0]) for table in tables[1:])


def test_options_that_are_refused():
    parameters = list(StaticEmbedding(4, 2, sparse=True).parameters())
    with pytest.raises(ValueError, match="rows: want one of 'all', 'replayed', 'touched'"):
        Adam(parameters, rows="some")
    with pytest.raises(ValueError, match="rows: want"):
        Adam([{"params": parameters, "rows": "some"}])
    training = Training(True)
    optimizer = Adam(training.model.parameters(), amsgrad=True)
    training.differentiate(0)
    with pytest.raises(RuntimeError, match="amsgrad: want False"):
        optimizer.step()


def arguments(name: str) -> dict[str, object]:
    """A right call of an operator, by the names of its arguments."""
    tables = {key: torch.ones(6, 3) for key in ("table", "exp_avg", "exp_avg_sq")}
    numbers = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    if name == "adam_rows_":
        rows = {"rows": torch.tensor([0, 4]), "gradient": torch.ones(2, 3), "steps": torch.tensor([1, 7])}
        return {
            **tables,
            **rows,
            "lr": 0.1,
            **numbers,
            "weight_decay": 0.0,
            "decoupled": True,
            "maximize": False,
        }
    last, rates = torch.tensor([8, 9, 8, 10, 11, 11]), torch.ones(4, 2, dtype=torch.float64)
    lag = {"last": last, "rows": torch.tensor([3, 0, 3]), "rates": rates, "step": 11}
    return {**tables, **lag, **numbers, "moments": True}


@native
@pytest.mark.parametrize("name", ["adam_rows_", "replay_rows_"])
def test_opcheck(name):
    torch.library.opcheck(getattr(torch.ops.fastqt, name), (), arguments(name))


@native
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("adam_rows_", {"rows": torch.tensor([4, 0])}, r"rows: want ascending numbers in 0\.\.5, got 0"),
        ("adam_rows_", {"rows": torch.tensor([0, 0])}, "rows: want ascending numbers"),
        ("adam_rows_", {"rows": torch.tensor([0, 6])}, r"in 0\.\.5, got 6 at position 1"),
        ("adam_rows_", {"rows": torch.tensor([0])}, "steps: want 1 numbers"),
        ("adam_rows_", {"gradient": torch.ones(2, 4)}, r"gradient: want \(2, 3\)"),
        ("adam_rows_", {"gradient": torch.ones(2, 3).double()}, "gradient: want"),
        ("adam_rows_", {"exp_avg": torch.ones(5, 3)}, "exp_avg: want"),
        ("adam_rows_", {"table": torch.ones(6, 3).half()}, "table: want a float32 or float64 matrix"),
        ("replay_rows_", {"rows": torch.tensor([6])}, r"rows: index out of range: want 0\.\.5, got 6"),
        ("replay_rows_", {"rows": torch.tensor([-1])}, "got -1 at position 0"),
        ("replay_rows_", {"last": torch.full((6,), 12)}, r"last: want 8\.\.11, got 12 for row 3"),
        ("replay_rows_", {"last": torch.full((6,), 7)}, r"last: want 8\.\.11, got 7 for row 3"),
        ("replay_rows_", {"last": torch.ones(6)}, "last: want a contiguous int64"),
        ("replay_rows_", {"rates": torch.ones(4, 2)}, "rates: want a contiguous float64"),
        ("replay_rows_", {"moments": False}, "rows: want None without moments"),
        ("replay_rows_", {"beta1": 1.0}, r"want numbers in \[0, 1\)"),
        ("replay_rows_", {"step": -1}, "step: want at least 0"),
    ],
)
def test_what_operators_refuse(name, change, message):
    getattr(torch.ops.fastqt, name)(**arguments(name))
    with pytest.raises(RuntimeError, match=message):
        getattr(torch.ops.fastqt, name)(**{**arguments(name), **change})

"""The model of a loss over many GPUs: its figures, and that what is stored is what it says now."""

from dataclasses import replace

import pytest

from benchmarks.predict import scaling
from benchmarks.predict.scaling_formulas import (
    CLIP,
    CLIP_DIRECT,
    CLIP_GATHER,
    FLOPS,
    INF_CL,
    OPEN_CLIP,
    ROWS,
    SIGMOID_DIRECT,
    SIGMOID_RING,
    SOFTMAX_DIRECT,
    SOFTMAX_GATHER,
    SOFTMAX_RING,
    TF32,
    Network,
    compute_seconds,
    exposed_seconds,
    hidden_from,
    loss_seconds,
    memory,
    transfer_seconds,
)

NETWORK = Network()
D, n = 768, 8192
MILLISECOND = 1e-3


@pytest.mark.parametrize(
    ("P", "compute", "transfer"), [(8, 3.3, 0.45), (64, 27, 4.7), (512, 213, 38), (4096, 1700, 303)]
)
def test_products_and_messages_of_a_softmax(P, compute, transfer):
    assert compute_seconds(6, n, n * P, D) == pytest.approx(compute * MILLISECOND, rel=0.02)
    found = transfer_seconds(4, n * P, D, NETWORK.bandwidth(P))
    assert found == pytest.approx(transfer * MILLISECOND, rel=0.02)


@pytest.mark.parametrize(("bandwidth", "rows"), [("nvlink", 1104), ("rails", 1461), ("nic", 9933)])
def test_rows_from_which_messages_are_hidden(bandwidth, rows):
    found = hidden_from(4, 6, getattr(NETWORK, bandwidth))
    assert round(found) == rows
    for P, width in ((8, 64), (4096, 4800)):
        compute = compute_seconds(6, found, found * P, width)
        transfer = transfer_seconds(4, found * P, width, getattr(NETWORK, bandwidth))
        assert compute == pytest.approx(transfer), "the rows depend on neither ranks nor width"


def test_twelve_million_pairs_on_32_gpus():
    N = 12 * 2**20
    assert compute_seconds(CLIP_GATHER.operations, N / 32, N, D) == pytest.approx(41, rel=0.01)
    assert compute_seconds(INF_CL.operations, N / 32, N, D, TF32 * FLOPS) == pytest.approx(205, rel=0.01)


@pytest.mark.parametrize(
    ("method", "operations", "moved"),
    [
        (CLIP_GATHER, 8, 6),
        (OPEN_CLIP, 12, 8),
        (INF_CL, 20, 24),
        (SOFTMAX_GATHER, 6, 4),
        (CLIP_DIRECT, 8, 8),
        (SOFTMAX_DIRECT, 8, 6),
        (SIGMOID_DIRECT, 6, 4),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_operations_and_bytes(method, operations, moved):
    assert (method.operations, method.bytes) == (operations, moved)


@pytest.mark.parametrize("P", [8, 4096])
def test_a_gather_exposes_its_messages_and_rings_by_rails_hide_them(P):
    messages = transfer_seconds(4, n * P, D, NETWORK.bandwidth(P))
    assert exposed_seconds(SOFTMAX_GATHER, n, P, D, NETWORK) == pytest.approx(messages)
    home = transfer_seconds(2, n, D, NETWORK.nvlink if P == 8 else NETWORK.rails / 8)
    for ring in (SOFTMAX_RING, SIGMOID_RING):
        assert exposed_seconds(ring, n, P, D, NETWORK) == pytest.approx(home)


@pytest.mark.parametrize(("ring", "enough"), [(SIGMOID_DIRECT, 9933), (SOFTMAX_DIRECT, 14900)])
def test_shards_that_are_sent_directly_need_the_rows_of_one_nic(ring, enough):
    for rows, hidden in ((enough + 1, True), (enough // 2, False)):
        home = transfer_seconds(2, rows, D, NETWORK.nic)
        exposed = exposed_seconds(ring, rows, 4096, D, NETWORK) - home
        assert (exposed < 1e-6 * loss_seconds(ring, rows, 4096, D, NETWORK)) is hidden


def test_a_ring_of_few_rows_waits_for_its_messages():
    rows = 256
    compute = compute_seconds(6, rows, rows * 4096, D)
    messages = transfer_seconds(4, rows * 4096, D, NETWORK.rails)
    assert messages > 5 * compute
    assert loss_seconds(SIGMOID_RING, rows, 4096, D, NETWORK) == pytest.approx(messages, rel=0.01)


@pytest.mark.parametrize("way", ["direct", "flat"])
def test_without_rails_a_node_is_left_on_one_nic(way):
    other = replace(SIGMOID_RING, way=way)
    rows = 1024
    assert loss_seconds(other, rows, 8, D, NETWORK) == loss_seconds(SIGMOID_RING, rows, 8, D, NETWORK)
    ratio = loss_seconds(other, rows, 4096, D, NETWORK) / loss_seconds(SIGMOID_RING, rows, 4096, D, NETWORK)
    assert ratio == pytest.approx(NETWORK.rails / NETWORK.nic, rel=0.01)


def test_memory():
    assert memory(CLIP_GATHER, n, 4096, D) == 6 * n * 4096 * D
    assert memory(CLIP_DIRECT, n, 4096, D) == memory(CLIP_DIRECT, n, 8, D) == 2 * 6 * n * D
    assert memory(OPEN_CLIP, n, 8, D) > 4 * n * n * 8, "its scores are kept"


@pytest.fixture(scope="module")
def stored():
    return scaling.stored()


def same(found, then):
    assert [r["seconds"] for r in found] == pytest.approx([r["seconds"] for r in then], rel=1e-4)
    assert [{**r, "seconds": 0} for r in found] == [{**r, "seconds": 0} for r in then]


ANEW = "store it again: python -m benchmarks.predict.scaling --write"


def test_stored_formulas_are_what_the_code_says(stored):
    rows = [(scaling.METHODS[r["method"]], r["n"], r["P"]) for r in stored["formulas"]]
    same(scaling.by_formula(rows, Network(**stored["network"])), stored["formulas"])
    assert {m.name for m in (*CLIP, *scaling.COMPARED)} == {r["method"] for r in stored["formulas"]}


def test_stored_simulations_are_what_the_code_says(stored):
    simulated = [r for r in stored["simulated"] if r["P"] <= 512]
    rows = [(scaling.METHODS[r["method"]], r["n"], r["P"]) for r in simulated]
    same(scaling.by_simulation(rows, Network(**stored["network"])), simulated)


@pytest.mark.slow
def test_all_that_is_stored_is_what_the_code_writes(stored):
    found = scaling.collect()
    for name in ("formulas", "simulated"):
        same(found[name], stored[name])
    for name in scaling.NOISES:
        same(found["noisy"][name], stored["noisy"][name])
    assert {name: found[name] for name in ("network", "flops", "D")} == {
        name: stored[name] for name in ("network", "flops", "D")
    }, ANEW


@pytest.mark.parametrize("name", scaling.TABLES)
def test_tables_show_every_row(stored, name):
    lines = scaling.TABLES[name](stored).splitlines()
    assert len(lines) > 2
    assert len({line.count("|") for line in lines}) == 1


def test_the_plot_shows_what_is_stored(stored, tmp_path):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    scaling.plot(stored, tmp_path / "plot.svg")
    drawn, kept = (tmp_path / "plot.svg").read_text(), scaling.PLOT.read_text()
    for method in (CLIP_GATHER, CLIP_DIRECT):
        assert f"{method.name}, simulated" in drawn
        assert f"{method.name}, simulated" in kept


def test_every_row_method_is_known():
    assert set(scaling.METHODS) == {m.name for m in (*ROWS, *CLIP)}

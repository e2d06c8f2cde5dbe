"""What is predicted for a GPU, beside arithmetic of its own; what is stored is what the engine launches."""

import json
import math
from pathlib import Path

import pytest
import triton

from benchmarks import predict
from tests.shared.processes import printed

# Milliseconds of siglip-kernel that its authors publish for 65,536 pairs with D = 768, by rows of a chunk.
PUBLISHED = {1024: 54.3, 4096: 48.8, 16384: 47.0}


@pytest.mark.parametrize("chunk", PUBLISHED)
def test_the_rate_gives_the_published_times_of_siglip_kernel(chunk):
    predicted = 1e3 * predict.seconds(predict.siglip_kernel(65536, 768, chunk), predict.GH200)
    assert predicted == pytest.approx(PUBLISHED[chunk], rel=0.02)


def test_a_launch_takes_the_longer_of_its_products_and_its_bytes():
    launch, memory = predict.LAUNCH, 1e12
    work = [
        predict.Work(3, predict.PRODUCTS, 1e11),  # a second of products
        predict.Work(1, predict.PRODUCTS, 4e12),  # four seconds of bytes
        predict.Work(2, predict.PRODUCTS, 0, 5e11),  # half a second that overlaps with nothing
        predict.Work(5, 0, 0),
    ]
    assert predict.seconds(work, memory) == pytest.approx(3 * 1 + 4 + 2 * 1.5 + 11 * launch)


def test_a_result_that_is_added_to_is_read_and_written():
    n, m, k = 512, 256, 1024
    written, added = (predict.product(n, m, k, 2, 4, add) for add in (False, True))
    assert written == predict.Work(1, 2 * n * m * k, 2 * (n * k + k * m) + 4 * n * m)
    assert added == predict.Work(1, 2 * n * m * k, 2 * (n * k + k * m), 2 * 4 * n * m)


@pytest.mark.parametrize("s", predict.stored(), ids=lambda s: f"{s.loss}, {s.N}, {s.D}, {s.memory}")
def test_every_score_is_multiplied_as_often_as_the_loss_needs(s):
    """Once for itself and once for each gradient; CLIP and the low memory mode make the scores twice."""
    products = sum(w.count * w.operations for w in s.work) / (2 * s.N**2 * s.D)
    sample = 2 * 256 / s.N  # of a softmax's columns, and of its rows
    wanted = 4 if s.loss == "CLIP" or s.memory == "low" else 3
    assert wanted <= products <= wanted + sample


@pytest.mark.parametrize("s", [s for s in predict.stored() if s.loss == "MixCSE released"], ids=lambda s: s.N)
def test_the_cells_of_mixcse_are_read_and_written_once_by_each_kernel(s):
    """Of each cell: two reads of a cosine in float32, and two gradients in bfloat16 that are written.

    Neighbouring chunks have a line in common, and there are the embeddings and their gradients.
    """
    cells = sum(w.count * w.moved for w in s.work if not w.operations)
    wanted = s.N**2 * (4 + 4 + 2 + 2)
    assert wanted <= cells <= 1.01 * wanted + 16 * s.N * s.D
    assert predict.seconds(s.work) < 2 * predict.seconds(predict.three_products(s.N, s.D))


def test_rows_that_hide_messages():
    """A rank's products take as long as its messages there."""
    n, ranks, D, bandwidth = predict.hidden_from(6, 4, 340e9), 64, 768, 340e9
    N = n * ranks
    assert math.isclose(6 * n * N * D / predict.PRODUCTS, 4 * N * D / bandwidth)


@pytest.mark.slow
def test_stored_launches_are_the_engines():
    now = printed("-m", "benchmarks.predict", "--note").splitlines()[1:]
    again = "store it again: python -m benchmarks.predict --write"
    assert now == predict.STORED.read_text().splitlines()[1:], again


STORED = Path(__file__).parents[2] / "benchmarks" / "results" / "counters.json"


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("problem", ["softmax, bf16", "sigmoid with biases, bf16", "guide, bf16"])
def test_a_kernel_executes_no_more_for_a_cell_than_it_did(problem, arch):
    """A change that is meant stores new counts: python -m benchmarks.counters --out FILE."""
    stored = json.loads(STORED.read_text())
    if stored["triton"] != triton.__version__:
        pytest.skip(f"the counts are of Triton {stored['triton']}, and this is {triton.__version__}")
    counted = json.loads(printed("-m", "benchmarks.counters", "--only", problem, str(arch)))
    known = stored["per cell"][problem][f"sm_{arch}"]
    assert counted.keys() == known.keys()
    for kernel, figures in counted.items():
        for name in ("instructions", "special", "tensor", "shared wavefronts", "global sectors"):
            assert figures.get(name, 0) == pytest.approx(known[kernel].get(name, 0), rel=0.02), (kernel, name)

"""The lines that README prints are one loss, and its table is of them."""

import pytest
import torch

from benchmarks import headline
from benchmarks.measure.workloads import embeddings


@pytest.mark.parametrize("name", [headline.PLAIN, headline.OURS, headline.BLOCK])
@pytest.mark.parametrize("rows", [8, 700])  # in a block, few rows are computed as they stand
def test_the_printed_programs_are_one_loss(name, rows):
    leaves = queries, candidates = embeddings(rows, rows, D=32)
    loss = headline.losses(*leaves)[name]()
    gradients = torch.autograd.grad(loss, leaves)

    exact = [x.detach().double().requires_grad_() for x in (queries, candidates)]
    units = [x / x.square().sum(1, keepdim=True).sqrt() for x in exact]
    scores = units[0] @ units[1].T / headline.TEMPERATURE
    formula = (scores.logsumexp(1) - scores.diagonal()).mean()
    wanted = torch.autograd.grad(formula, exact)
    assert loss.item() == pytest.approx(formula.item(), rel=1e-6)
    for gradient, exact_gradient in zip(gradients, wanted, strict=True):
        assert (gradient - exact_gradient).abs().max() <= 2e-6 * exact_gradient.abs().max()


def test_a_page_without_the_lines_is_refused(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("```python\nwith fastqt.fused():\n    g()\n```\n```python\nloss = f()\n```\n")
    with pytest.raises(
        ValueError, match=r"README.md: the first blocks .* no loss of plain PyTorch, in the block"
    ):
        headline.programs(page)


def test_the_table_has_the_figures_of_the_run():
    batches = [
        {
            "rows": 1024,
            "peaks": {"fastqt": 3 << 20, "in the block": 4 << 20, "plain PyTorch": 34 << 20},
            "seconds": {"fastqt": 0.011, "in the block": 0.012, "plain PyTorch": 1.26},
        }
    ]
    assert headline.batches_table(batches).splitlines()[-1] == "| 1,024 | 3 | 4 | 34 | 0.01 | 0.01 | 1.3 |"
    run = {"machine_info": {"threads": 2}, "batches": batches}
    sentence = headline.largest_sentence(run)
    assert "took 34 MiB beside inputs and gradients, and 1.3 s." in sentence
    assert "the same lines took 4 MiB and 0.0 s." in sentence


def test_the_sentence_of_a_second_machine_has_its_times():
    seconds = {"fastqt": 0.1, "in the block": 0.2, "plain PyTorch": 0.3}
    batches = [{"rows": rows, "seconds": seconds} for rows in (1024, 2048)]
    batches.append({"rows": 4096, "seconds": {name: 10 * time for name, time in seconds.items()}})
    sentence = headline.times_sentence({"machine_info": {"cpu": "Intel Xeon"}, "batches": batches})
    assert sentence == (
        "On an Intel Xeon, whose products are those of MKL, 2,048 and 4,096 rows took fastqt 0.10 and 1.0 s, "
        "the block 0.20 and 2.0 s, and plain PyTorch 0.30 and 3.0 s."
    )

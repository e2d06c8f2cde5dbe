"""The demonstration: trains QuickThoughts on the text of Python's own language reference, offline."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from fastqt.errors import InputError
from fastqt.inference.search import nearest
from fastqt.runs.config import TrainConfig
from fastqt.runs.model import SentenceEncoder
from fastqt.tools.bench import compare, mebibytes
from fastqt.train import train
from fastqt.train.progress import Display

STEPS, REPORT_EVERY = 600, 100
COMPARED = (4096, 512)  # (N, D) at which the loss is compared with eager PyTorch
HELD_OUT = 8  # every eighth topic is held out for validation
QUERIES = (
    "The expression list is evaluated from left to right.",
    "Return true if all characters in the string are digits.",
    "If the file cannot be found, an exception is raised.",
)
PROSE = re.compile(r"""[A-Z("'].*[.:?!)]""", re.DOTALL)
NOT_PROSE = re.compile(r"::=|>>>|->|\.\.\. |\+--|==|\|")
SENTENCE_END = re.compile(r"(?<!e\.g\.)(?<!i\.e\.)(?<=[.?!])\s+(?=[A-Z\"'(])")


def run() -> None:
    """Trains a small model, prints what it learns, and compares the loss with eager PyTorch.

    Raises:
        InputError: this Python comes without `pydoc_data.topics`.
    """
    began = time.perf_counter()
    documents = list(read_topics())
    with tempfile.TemporaryDirectory(prefix="fastqt-demo-") as name:
        directory = Path(name)
        corpus, valid = directory / "corpus.txt", directory / "valid.txt"
        _write(corpus, [text for number, text in enumerate(documents) if number % HELD_OUT])
        _write(valid, documents[::HELD_OUT])
        config = TrainConfig(
            corpus=(str(corpus),),
            valid=str(valid),
            batch_size=256,
            context_size=1,
            vocab_size=8000,
            epochs=1000,
            steps=STEPS,
            report_every=REPORT_EVERY,
            valid_every=REPORT_EVERY,
            checkpoint_every=10_000,
        )
        sentences = sum(map(len, documents))
        print(f"fastqt demo: {sentences} sentences of the Python language reference, {len(documents)} topics")
        print(
            "\nEach sentence learns to pick a neighbour, the one before or after it, out of a batch of 256."
        )
        print(f"{'step':>6} {'loss':>7} {'picked':>8} {'held out':>9} {'chance':>7} {'sentences/s':>12}")
        train(config, directory / "run", display=_Table)
        _show_neighbors(SentenceEncoder.load(directory / "run"), str(corpus))
    _show_loss()
    print(f"\n{time.perf_counter() - began:.0f} s in all. Your own text: fastqt train CORPUS --out DIR")


def read_topics() -> Iterator[list[str]]:
    """The prose of `pydoc_data.topics`: for each topic its sentences in order, without repeated paragraphs.

    Raises:
        InputError: this Python comes without `pydoc_data.topics`.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise InputError(
            "demo: this Python comes without its language reference (pydoc_data.topics); install it "
            "(e.g. libpython3-stdlib or python3-doc), or train on a text of your own: fastqt train"
        ) from None
    seen: set[str] = set()
    for text in topics.values():
        sentences: list[str] = []
        for paragraph in re.split(r"\n\s*\n", text):
            prose = _prose(paragraph)
            if prose not in seen:
                seen.add(prose)
                sentences += SENTENCE_END.split(prose) if prose else []
        if sentences:
            yield sentences


def _prose(paragraph: str) -> str:
    """A paragraph on one line and without markup; "" for code, tables, headings and signatures."""
    text = " ".join(paragraph.split())
    text = re.sub(r"^(\* |[0-9]+\. |\[[0-9]+\] )", "", text)
    text = re.sub(r"[*\"`]|\[[0-9]+\]", "", text)
    words = re.findall(r"[A-Za-z]+", text)
    wordy = len(words) >= 5 and sum(map(len, words)) >= 0.7 * len(text.replace(" ", ""))
    return text if wordy and PROSE.fullmatch(text) and not NOT_PROSE.search(text) else ""


def _write(path: Path, documents: list[list[str]]) -> None:
    path.write_text("\n\n".join("\n".join(sentences) for sentences in documents), encoding="utf-8")


class _Table(Display):
    """Prints one row of a table per report, on standard output."""

    @staticmethod
    def note(text: str) -> None:
        """Prints nothing, because reading this small text takes no time."""

    def report(self, line: dict[str, float]) -> None:
        if self._bar is not None:
            self._bar.clear()
        # Each accuracy is a share of the N-1 rows that have that neighbour. The demo shows a share of all N
        # rows.
        rows = 1 - line["chance"]
        picked = rows * (line["forward_accuracy"] + line["backward_accuracy"])
        held_out = rows * (line["validation_forward_accuracy"] + line["validation_backward_accuracy"])
        print(
            f"{line['step']:>6} {line['loss']:>7.3f} {picked:>8.1%} {held_out:>9.1%} "
            f"{2 * line['chance']:>7.1%} {line['sentences_per_second']:>12,.0f}",
            flush=True,
        )


def _show_neighbors(encoder: SentenceEncoder, corpus: str) -> None:
    print("\nNearest sentences, by cosine:")
    for query, found in zip(QUERIES, nearest(encoder, QUERIES, [corpus], 2), strict=True):
        print(f"  {query}")
        for neighbor in found:
            print(f"    {neighbor.cosine:.2f}  {_shortened(neighbor.sentence)}")


def _shortened(sentence: str, width: int = 90) -> str:
    return sentence if len(sentence) <= width else sentence[: width - 1].rsplit(" ", 1)[0] + " …"


def _show_loss() -> None:
    result = compare(*COMPARED, repeats=3)
    print(f"\nThe loss and its gradients at {result.N} sentences of width {result.D}:")
    for name, seconds, size in (
        ("eager PyTorch", result.eager_seconds, result.eager_bytes),
        ("fastqt", result.fused_seconds, result.fused_bytes),
    ):
        print(f"  {name:<14} {seconds * 1e3:>6.0f} ms {mebibytes(size):>8} MiB above its inputs")
    print(
        f"  relative difference: {result.loss_difference:.0e} in the loss, "
        f"{result.gradient_difference:.0e} in the gradients"
    )

"""An index of a large text, its recall, and the time of a search in it beside that of comparing with all.

    python examples/search_a_million.py RUN novels.txt.xz more-novels.txt.xz --query "She closed the door."

RUN is a directory that `fastqt train` wrote. Needs the extra `faiss`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from fastqt.sentences.evaluation import nearest
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.inference.index import build_index


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", help="a directory that fastqt train wrote")
    parser.add_argument("corpus", nargs="+", help="texts with a sentence on each line")
    parser.add_argument("--query", action="append", required=True, help="a sentence; may be repeated")
    parser.add_argument("-k", type=int, default=5)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> list[str]:
    """Builds the index, searches, and returns the lines that it prints."""
    settings = options(arguments)
    encoder = SentenceEncoder.load(settings.run)

    with TemporaryDirectory() as folder:
        began = time.process_time()
        index = build_index(encoder, settings.corpus, Path(folder) / "corpus.index")
        lines = [str(index), f"built in {(time.process_time() - began) / 60:.1f} minutes of the processors"]

        began = time.perf_counter()
        neighbours = index.search(encoder, settings.query, settings.k)
        each = (time.perf_counter() - began) / len(settings.query)
        lines.append(f"a search: {1e3 * each:.0f} ms")

    began = time.perf_counter()
    exact = nearest(encoder, settings.query, settings.corpus, settings.k)
    lines.append(f"encoding the text and comparing with all of it: {time.perf_counter() - began:.0f} s")

    for query, approximate, wanted in zip(settings.query, neighbours, exact, strict=True):
        lines.append(query)
        missed = {neighbour.sentence for neighbour in wanted} - {
            neighbour.sentence for neighbour in approximate
        }
        lines += [f"  {cosine:.3f}  {text}" for cosine, text, *_ in approximate]
        lines += [f"  missed: {sentence}" for sentence in sorted(missed)]

    print("\n".join(lines))
    return lines


if __name__ == "__main__":
    main()

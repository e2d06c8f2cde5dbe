"""The image-caption protocol from files: features of images, their captions, and three parts of both."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastqt.errors import InputError
from fastqt.sentences.evaluation.retrieval import Pairs, Retrieval, chance, fit_maps
from fastqt.sentences.evaluation.suite import Results
from fastqt.sentences.evaluation.vectors import Encode, Vectors, embed
from fastqt.sentences.options.commands import MapOptions
from fastqt.sentences.text.reader import check_bytes, numbered_lines
from fastqt.sentences.text.vectors import map_rows

PARTS = ("train", "dev", "test")
IMAGE = re.compile(r" *[0-9]{1,18}")  # the number of an image
LEAST_IMAGES = 2  # of each part: one alone is always found
DIRECTIONS = ("captions by image", "images by caption")


class Caption(NamedTuple):
    """A caption, and the row of its image's features."""

    text: str
    image: int


def read_features(path: str | Path) -> NDArray[np.float32]:
    """The features of images, (n, d) float32 and finite, from an .npy file of any floating-point type."""
    rows = map_rows(path)
    check_bytes(rows.size * 4, str(path))
    with np.errstate(over="ignore"):
        features = rows.astype(np.float32)
    if not np.isfinite(features).all():
        raise InputError(f"{path}: want finite numbers of 32 bits, got NaN, infinity or a larger number")
    return features


def read_captions(path: str, images: int) -> list[Caption]:
    """The captions of images, from a text file or a table.

    In a text file, as of `fastqt.sentences.text.read_blocks`, line i is the caption of image i, counted from
    0, or blank. A file whose name ends in .tsv, or in .tsv and that of a compression, has lines "caption,
    tab, number of its image"; an image may have several captions there.
    """
    is_table = ".tsv" in Path(path).suffixes
    captions: list[Caption] = []
    for number, line in numbered_lines(path):
        if not (line := line.strip()):
            continue
        where = f"{path}: line {number}"
        text, image = _fields(line, where) if is_table else (line, number - 1)
        if not 0 <= image < images:
            raise InputError(f"{where}: want an image from 0 to {images - 1}, got {image}")
        captions.append(Caption(text, image))
    if not captions:
        raise InputError(f"{path} holds no caption")
    return captions


def _fields(line: str, where: str) -> tuple[str, int]:
    text, tab, image = line.rpartition("\t")
    if not tab or not text.strip() or not IMAGE.fullmatch(image):
        raise InputError(f"{where}: want a caption, a tab and the number of its image, got {line!r:.100}")
    return text.strip(), int(image)


def split_by_share(captions: Sequence[Caption], share: float, seed: int) -> tuple[list[Caption], ...]:
    """Divides captions by their images into parts to train on, to stop by and to test on.

    Each of the last two has a `share` of the images, between 0 and 0.5. The seed determines the parts.
    """
    if not 0 < share < 0.5:
        raise InputError(f"share: want a number between 0 and 0.5, got {share}")
    images = np.unique([caption.image for caption in captions])
    held_out = round(share * len(images))
    if held_out < LEAST_IMAGES:
        raise InputError(
            f"share: want at least {LEAST_IMAGES} images in a part, got {held_out} of {len(images)}"
        )
    order = np.random.default_rng(seed).permutation(images)
    part_of = {int(image): 0 for image in order}
    part_of |= {int(image): 1 for image in order[:held_out]}
    part_of |= {int(image): 2 for image in order[held_out : 2 * held_out]}
    return tuple([each for each in captions if part_of[each.image] == part] for part in range(3))


def check_parts(parts: Sequence[Sequence[Caption]], files: Sequence[str]) -> None:
    """Checks that no two parts that were given as files share an image, and that none has a single image."""
    images = [{caption.image for caption in part} for part in parts]
    for first, name in enumerate(files):
        if len(images[first]) < LEAST_IMAGES:
            raise InputError(f"{name}: want captions of at least {LEAST_IMAGES} images, got 1")
        for second in range(first + 1, len(files)):
            if shared := images[first] & images[second]:
                raise InputError(
                    f"{files[second]}: want images that are in no other part, got image {min(shared)}, which "
                    f"is in {name} too"
                )


def evaluate_retrieval(
    encode: Encode,
    features: NDArray[np.float32],
    parts: Sequence[Sequence[Caption]],
    options: MapOptions | None = None,
    *,
    progress: bool = True,
) -> Results:
    """Learns a map of each side on the first part, stops by the second one and tests on the third one.

    `encode` and `progress` are as of `fastqt.sentences.evaluation.evaluate`, and `features` (n, d) are those
    of all images. A part has captions, and their images are the candidates. The results are R@1, R@5, R@10
    and the median rank on the third part for each direction, and what chance gives.

    Source: Kiros et al. (2015), section 3.4; Logeswaran and Lee (arXiv:1803.02893).
    """
    options = options or MapOptions()
    start = time.perf_counter()
    texts = list(dict.fromkeys(caption.text for part in parts for caption in part))
    vectors = embed(encode, texts, progress=progress)

    if (per_task := getattr(encode, "per_task", None)) is not None:
        vectors = Vectors(texts, per_task(vectors(texts)))
    seconds = {"encode": time.perf_counter() - start}

    train, dev, test = (_pairs(features, part, vectors) for part in parts)
    start = time.perf_counter()
    maps = fit_maps(*train, **asdict(options), dev=dev, progress=progress)
    seconds["fit"] = time.perf_counter() - start

    figures: dict[str, dict[str, Any]] = {
        name: {**_figures(reached), "chance": _figures(expected)}
        for name, reached, expected in zip(
            DIRECTIONS, maps.retrieve(*test), chance(test.owners, len(test.images)), strict=True
        )
    }
    sizes = {
        name: {"images": len(part.images), "captions": len(part.owners)}
        for name, part in zip(PARTS, (train, dev, test), strict=True)
    }

    settings = {**asdict(options), "epochs_trained": maps.epochs, "parts": sizes}
    return Results(figures, settings, seconds, len(texts), vectors.matrix.shape[1])


def _pairs(features: NDArray[np.float32], captions: Sequence[Caption], vectors: Vectors) -> Pairs:
    images, owners = np.unique([caption.image for caption in captions], return_inverse=True)
    return Pairs(features[images], vectors([caption.text for caption in captions]), owners.astype(np.int64))


def _figures(retrieval: Retrieval) -> dict[str, float]:
    return {
        "R@1": retrieval.r1,
        "R@5": retrieval.r5,
        "R@10": retrieval.r10,
        "median rank": retrieval.median_rank,
    }

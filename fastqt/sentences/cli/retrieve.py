"""fastqt retrieve: find captions by images and images by captions, with a linear map of each side."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from fastqt.errors import InputError
from fastqt.options import Device
from fastqt.sentences.cli.declared import add_options
from fastqt.sentences.cli.kinds import add_device, add_value, number, path
from fastqt.sentences.options.evaluation import MapOptions


def add_parser(commands: Any) -> None:
    """Adds the command's options to the subparsers of `fastqt`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "retrieve",
        help="evaluate sentence vectors by the retrieval of images and their captions",
        description="Features and sentence vectors are mapped linearly into a common space, with a margin "
        "loss. MODEL is as for evaluate. In a text file line i is the caption of image i, counted from 0; a "
        "line of a .tsv file is a caption, a tab and the number of its image.",
    )
    parser.add_argument("model", type=path, metavar="MODEL", help="the encoder to evaluate")
    parser.add_argument(
        "--features", required=True, type=path, metavar="X.npy", help="a row of features for each image"
    )
    parser.add_argument(
        "--captions", required=True, type=path, metavar="FILE", help="the captions, or those to train on"
    )
    parser.add_argument("--dev", type=path, metavar="FILE", help="captions to stop the training by")
    parser.add_argument("--test", type=path, metavar="FILE", help="captions to test on")

    add_value(
        parser,
        "--share",
        number,
        0.1,
        "without --dev and --test, the share of the images in each of these parts",
        "X",
    )

    add_options(parser, MapOptions)
    parser.add_argument("--json", type=path, metavar="OUT", help="file for all results")
    parser.add_argument(
        "--raw", action="store_true", help="do not scale sentence vectors, or their halves, to norm 1"
    )
    add_device(parser)


def run(
    model: str,
    features: str,
    captions: str,
    dev: str | None,
    test: str | None,
    share: float,
    json: str | None,
    raw: bool,
    device: Device,
    **options: Any,
) -> int:
    """Runs the command. For the arguments see `add_parser`; returns the exit status."""
    try:
        from fastqt.sentences import evaluation
    except ImportError as error:
        raise InputError(f"retrieve: {error}") from error
    from fastqt.sentences.evaluation import captions as protocol
    from fastqt.sentences.runs.digests import digest
    from fastqt.sentences.runs.files import check_can_be_written, check_ending
    from fastqt.sentences.text.reader import check_rereadable, check_stdin_once

    chosen = MapOptions(**options)
    if json is not None:
        check_ending(json, ".json")
        check_can_be_written(json)
    if (dev is None) != (test is None):
        raise InputError(f"{'dev' if dev is None else 'test'}: want both --dev and --test or neither of them")
    check_rereadable("features", [features])
    images = protocol.read_features(features)
    files = [name for name in (captions, dev, test) if name is not None]
    check_stdin_once("captions, dev and test", files)
    parts = tuple(protocol.read_captions(name, len(images)) for name in files)
    if dev is None:
        parts = protocol.split_by_share(parts[0], share, chosen.seed)
    else:
        protocol.check_parts(parts, files)
    encoder = evaluation.load_encoder(model, device=device, raw=raw, seed=chosen.seed)
    results = protocol.evaluate_retrieval(encoder.encode, images, parts, chosen)
    if json is not None:  # first, since nobody may read the table
        results.save(
            Path(json),
            command=shlex.join(["fastqt", *sys.argv[1:]]),
            model=model,
            identity=encoder.identity,
            features={"file": features, "sha256": digest(Path(features)), "width": images.shape[1]},
            captions=files,
            share=share if dev is None else None,
        )
    print(results.table())
    return 0

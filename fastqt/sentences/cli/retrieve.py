"""fastqt retrieve: find captions by images and images by captions, with a linear map of each side."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fastqt.errors import InputError
from fastqt.sentences.cli.command import OfModel
from fastqt.sentences.options.commands import MapOptions
from fastqt.sentences.options.option import option


@dataclass(frozen=True, kw_only=True)
class Retrieve(OfModel, MapOptions):
    """Features and sentence vectors are mapped linearly into a common space, with a margin loss.

    MODEL is as for evaluate. In a text file line i is the caption of image i, counted from 0; a line of a
    .tsv file is a caption, a tab and the number of its image.
    """

    title: ClassVar[str] = "evaluate sentence vectors by the retrieval of images and their captions"

    features: str = option(help="a row of features for each image", file="X.npy")
    captions: str = option(help="the captions, or those to train on", file="FILE")
    dev: str | None = option(None, "captions to stop the training by", file="FILE")
    test: str | None = option(None, "captions to test on", file="FILE")
    share: float = option(0.1, "without --dev and --test, the share of the images in each of these parts")
    json: str | None = option(None, "file for all results", file="OUT")
    raw: bool = option(False, "do not scale sentence vectors, or their halves, to norm 1")

    def run(self) -> int:
        try:
            from fastqt.sentences import evaluation
        except ImportError as error:
            raise InputError(f"retrieve: {error}") from error
        from fastqt.sentences.evaluation import captions as protocol
        from fastqt.sentences.runs.files import check_can_be_written, check_ending, digest
        from fastqt.sentences.text.reader import check_rereadable, check_stdin_once

        if self.json is not None:
            check_ending(self.json, ".json")
            check_can_be_written(self.json)
        if (self.dev is None) != (self.test is None):
            missing = "dev" if self.dev is None else "test"
            raise InputError(f"{missing}: want both --dev and --test or neither of them")
        check_rereadable("features", [self.features])
        images = protocol.read_features(self.features)
        files = [name for name in (self.captions, self.dev, self.test) if name is not None]
        check_stdin_once("captions, dev and test", files)

        parts = tuple(protocol.read_captions(name, len(images)) for name in files)
        if self.dev is None:
            parts = protocol.split_by_share(parts[0], self.share, self.seed)
        else:
            protocol.check_parts(parts, files)
        encoder = evaluation.load_encoder(self.model, device=self.device, raw=self.raw, seed=self.seed)
        results = protocol.evaluate_retrieval(encoder.encode, images, parts, self.part(MapOptions))
        if self.json is not None:  # first, since nobody may read the table
            features = {
                "file": self.features,
                "sha256": digest(Path(self.features)),
                "width": images.shape[1],
            }
            results.save(
                Path(self.json),
                command=shlex.join(["fastqt", *sys.argv[1:]]),
                model=self.model,
                identity=encoder.identity,
                features=features,
                captions=files,
                share=self.share if self.dev is None else None,
            )
        print(results.table())
        return 0

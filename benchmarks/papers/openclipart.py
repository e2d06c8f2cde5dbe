"""The Open Clip Art Library as images with captions, for `fastqt retrieve`.

Debian's packages openclipart-png and openclipart-svg hold the pictures and their titles. Without root:

    apt-get download openclipart-png openclipart-svg
    for package in *.deb; do dpkg -x $package unpacked; done
    python -m benchmarks.papers.openclipart unpacked/usr/share/openclipart OUT

writes OUT/features.npy and OUT/captions.tsv. The image encoder is small and untrained: a convolutional net of
random weights, a histogram of colours and a thumbnail. It has seen neither pictures nor titles before.
"""

from __future__ import annotations

import argparse
import html
import re
import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

SIDE = 64  # pixels of a rendering
CELLS = 4  # of a histogram, along each colour
THUMBNAIL = 8  # pixels
MOST_PIXELS = 1 << 25  # of a picture, which then takes 128 MiB
CHANNELS = (3, 64, 128, 256)  # of the net
TITLE = re.compile(r"<dc:title[^>]*>([^<]*)</dc:title>")
WORD = re.compile(r"[^\W\d_]+")
# Titles of whole collections, which say nothing of a picture.
COLLECTION = re.compile(r"^(clipart by .* - |part of the .*$)", re.IGNORECASE)


class Picture(NamedTuple):
    """A picture and what it shows."""

    path: Path  # of the PNG
    caption: str


def caption_of(title: str, stem: str) -> str:
    """The words of a picture's title in lower case; those of its file's name, if the title has none.

    Args:
        title: as in the SVG's metadata.
        stem: the file's name without its ending.
    """
    for text in (COLLECTION.sub("", title.strip()), stem):
        if words := WORD.findall(text):
            return " ".join(words).lower()
    return ""


def pictures(folder: Path) -> list[Picture]:
    """The pictures of a folder with a title, in the order of their names.

    Links and pictures of more than 2^25 pixels are left out. Of several pictures with the same caption the
    first is taken: the others could not be told apart by it.

    Args:
        folder: with folders png and svg, in which a picture has the same place.
    """
    by_caption: dict[str, Picture] = {}
    for path in sorted((folder / "png").rglob("*.png")):
        svg = (folder / "svg" / path.relative_to(folder / "png")).with_suffix(".svg")
        if path.is_symlink() or not svg.is_file() or pixels(path) > MOST_PIXELS:
            continue
        title = TITLE.search(svg.read_text(encoding="utf-8", errors="replace"))
        caption = caption_of(html.unescape(title[1]) if title else "", path.stem)
        if caption:
            by_caption.setdefault(caption, Picture(path, caption))
    return sorted(by_caption.values())


def pixels(path: Path) -> int:
    """The number of pixels of a PNG, whose header says it."""
    with path.open("rb") as file:
        width, height = struct.unpack(">II", file.read(24)[16:])
    return int(width * height)


def rendering(path: Path) -> NDArray[np.uint8]:
    """A picture in the middle of a white square, (SIDE, SIDE, 3)."""
    with Image.open(path) as file:
        picture = file.convert("RGBA")
    picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    square = Image.new("RGBA", (SIDE, SIDE), "white")
    square.alpha_composite(picture, tuple((SIDE - size) // 2 for size in picture.size))
    return np.asarray(square.convert("RGB"))


def random_net(seed: int = 0) -> nn.Sequential:
    """Convolutions with random weights and rectifiers; each halves the sides of an image."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for before, after in pairwise(CHANNELS):
            convolution = nn.Conv2d(before, after, 5, stride=2, padding=2)
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            layers += [convolution, nn.ReLU()]
        return nn.Sequential(*layers).eval()


@torch.no_grad()
def features(renderings: NDArray[np.uint8], net: nn.Module) -> Tensor:
    """The features of images, in blocks that have norm 1 each.

    Args:
        renderings: (B, SIDE, SIDE, 3).
        net: maps (B, 3, SIDE, SIDE) to (B, C, h, w).

    Returns:
        (B, 2 C + CELLS^3 + THUMBNAIL^2) float32: the means and the highest values of the net's channels, the
        roots of the shares of colours, and the brightness of a thumbnail.
    """
    x = torch.from_numpy(renderings).permute(0, 3, 1, 2).float() / 255
    maps = net(x - 0.5).flatten(2)
    cells = (x * (CELLS - 1e-3)).long()
    colours = (cells[:, 0] * CELLS + cells[:, 1]) * CELLS + cells[:, 2]
    shares = F.one_hot(colours.flatten(1), CELLS**3).float().mean(dim=1)
    thumbnail = F.adaptive_avg_pool2d(1 - x.mean(dim=1), THUMBNAIL).flatten(1)
    blocks = (maps.mean(dim=2), maps.amax(dim=2), shares.sqrt(), thumbnail)
    return torch.cat([F.normalize(block, dim=1) for block in blocks], dim=1)


def write(folder: Path, out: Path, *, batch: int = 256) -> int:
    """Writes features.npy and captions.tsv; for the folder see `pictures`. Returns the number of pictures."""
    images, net = pictures(folder), random_net()
    if not images:
        raise SystemExit(f"no pictures: want the folders png and svg in {folder}")
    parts = [
        features(np.stack([rendering(picture.path) for picture in part]), net)
        for part in _parts(images, batch)
    ]
    out.mkdir(parents=True, exist_ok=True)
    np.save(out / "features.npy", torch.cat(parts).numpy())
    lines = (f"{picture.caption}\t{number}\n" for number, picture in enumerate(images))
    (out / "captions.tsv").write_text("".join(lines), encoding="utf-8")
    return len(images)


def _parts(images: Sequence[Picture], size: int) -> Iterable[Sequence[Picture]]:
    return (images[begin : begin + size] for begin in range(0, len(images), size))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the packages' png and svg are")
    parser.add_argument("out", type=Path, help="folder to write to")
    arguments = parser.parse_args()
    print(f"{arguments.out}: {write(arguments.folder, arguments.out)} pictures")

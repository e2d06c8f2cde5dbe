"""The pieces of the Open Clip Art data, on pictures that are drawn here."""

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.papers.openclipart import (
    CELLS,
    SIDE,
    THUMBNAIL,
    caption_of,
    features,
    pictures,
    pixels,
    random_net,
    rendering,
    write,
)
from fastqt.sentences.evaluation.captions import read_captions, read_features

SVG = """<svg><metadata><dc:title>{}</dc:title><dc:publisher><cc:Agent><dc:title>Someone
</dc:title></cc:Agent></dc:publisher></metadata></svg>"""


def draw(folder, name, title, size, colour):
    """A picture of one colour, in the lower half of a transparent ground."""
    for kind in ("png", "svg"):
        (folder / kind / name).parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new("RGBA", size, (0, 0, 0, 0))
    picture.paste(colour, (0, size[1] // 2, size[0], size[1]))
    picture.save(folder / "png" / f"{name}.png")
    (folder / "svg" / f"{name}.svg").write_text(SVG.format(title), encoding="utf-8")


@pytest.fixture
def folder(tmp_path):
    draw(tmp_path, "food/apple_01", "Red_Apple 2 &amp; Leaf", (200, 100), "red")
    draw(tmp_path, "tools/saw_02", "", (30, 60), "blue")
    return tmp_path


@pytest.mark.parametrize(
    ("title", "stem", "caption"),
    [
        ("Red_Apple 2 & Leaf", "x", "red apple leaf"),
        ("", "blue_vacuum-cleaner_01", "blue vacuum cleaner"),
        ("12", "saw", "saw"),
        ("Clipart by Nicu Buculei - jigsaw_red_10", "x", "jigsaw red"),
        ("Part of the Flat Icon Collection (2004)", "gg_online", "gg online"),
        ("Öl", "x", "öl"),
        ("1", "2", ""),
    ],
)
def test_captions_are_the_words_of_titles_or_of_names(title, stem, caption):
    assert caption_of(title, stem) == caption


def test_pictures_of_a_folder(folder):
    draw(folder, "tools/again", "red apple leaf", (9, 9), "red")  # a caption that another picture has
    (folder / "png" / "tools" / "link.png").symlink_to("saw_02.png")
    (folder / "png" / "tools" / "alone.png").write_bytes(b"without an SVG")
    found = pictures(folder)
    assert [(picture.path.name, picture.caption) for picture in found] == [
        ("apple_01.png", "red apple leaf"),
        ("saw_02.png", "saw"),
    ]
    assert [pixels(picture.path) for picture in found] == [20_000, 1_800]


def test_too_large_pictures_are_left_out(folder, monkeypatch):
    monkeypatch.setattr("benchmarks.papers.openclipart.MOST_PIXELS", 10_000)
    assert [picture.caption for picture in pictures(folder)] == ["saw"]


def test_a_rendering_lies_in_the_middle_of_white(folder):
    image = rendering(folder / "png/food/apple_01.png")
    assert image.shape == (SIDE, SIDE, 3)
    assert (image[:28] == 255).all()  # 64 x 32 pixels, the upper half of them transparent
    assert (image[36:44] == (255, 0, 0)).all()
    assert (image[49:] == 255).all()
    tall = rendering(folder / "png/tools/saw_02.png")
    assert (tall[:, :17] == 255).all()  # 30 pixels wide: a picture is never made larger
    assert (tall[33:60, 18:46] == (0, 0, 255)).all()


def test_features_by_definition(folder):
    images = np.stack([rendering(path) for path in sorted(folder.rglob("*.png"))])
    net = random_net()
    found = features(images, net).double().numpy()
    maps = net(torch.tensor(images.transpose(0, 3, 1, 2) / 255 - 0.5).float()).detach().double().numpy()
    assert maps.shape == (2, 256, 8, 8)
    for row, image in enumerate(images):
        shares = np.zeros((CELLS, CELLS, CELLS))
        for red, green, blue in image.reshape(-1, 3).tolist():
            shares[red * CELLS // 256, green * CELLS // 256, blue * CELLS // 256] += 1 / SIDE**2
        size = SIDE // THUMBNAIL
        dark = 1 - image.mean(axis=2) / 255
        thumbnail = dark.reshape(THUMBNAIL, size, THUMBNAIL, size).mean(axis=(1, 3))
        blocks = (maps[row].mean(axis=(1, 2)), maps[row].max(axis=(1, 2)), np.sqrt(shares), thumbnail)
        wanted = np.concatenate([block.ravel() / np.linalg.norm(block) for block in blocks])
        np.testing.assert_allclose(found[row], wanted, atol=1e-6)


def test_the_net_is_the_same_each_time():
    before = torch.get_rng_state()
    first, again, other = (random_net(seed)[0].weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_written_is_what_retrieve_reads(folder, tmp_path):
    assert write(folder, tmp_path / "out", batch=1) == 2
    found = read_features(tmp_path / "out" / "features.npy")
    assert found.shape == (2, 2 * 256 + CELLS**3 + THUMBNAIL**2)
    captions = read_captions(str(tmp_path / "out" / "captions.tsv"), len(found))
    assert captions == [("red apple leaf", 0), ("saw", 1)]
    with pytest.raises(SystemExit, match="no pictures: want the folders png and svg in"):
        write(tmp_path / "out", tmp_path / "other")

"""Retrieval, nearest rows and analogies, on planted data and by hand."""

import numpy as np
import pytest
import torch

from fastqt.sentences.evaluation import LinearMaps, analogies, fit_maps, nearest_rows, pools, retrieval
from fastqt.sentences.evaluation.retrieval import Pairs, chance
from tests.shared.tolerances import FLOAT32


def planted(images=120, captions=3, seed=0):
    """Images, their captions as noisy linear functions of the images, and the owner of each caption."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((images, 12))
    owners = generator.permutation(np.repeat(np.arange(images), captions))
    y = x[owners] @ np.random.default_rng(99).standard_normal((12, 20))
    return x, y + 0.3 * generator.standard_normal(y.shape), owners


def test_planted_pairs_are_found_and_shuffled_pairs_are_not():
    maps = fit_maps(*planted(), dim=16, epochs=40, batch_size=60, learning_rate=3e-3)
    x, y, owners = planted(seed=1)
    for found in maps.retrieve(x, y, owners):
        assert found.r1 > 0.8
        assert found.median_rank == 1
    captions, images = maps.retrieve(x, y, np.random.default_rng(0).permutation(owners))
    assert images.r10 < 0.2  # chance: 10 of 120
    assert images.median_rank > 30
    assert captions.median_rank > 30  # the best of three captions among 360


def test_the_seed_determines_the_maps():
    data = planted(30)
    first, again, other = (fit_maps(*data, dim=4, epochs=1, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.image.weight, again.image.weight)
    assert not torch.equal(first.image.weight, other.image.weight)


def test_ranks_by_hand(monkeypatch):
    monkeypatch.setattr(retrieval, "BLOCK_ROWS", 2)
    maps = LinearMaps(2, 2, 2)
    for side in (maps.image, maps.caption):
        torch.nn.init.eye_(side.weight)
        torch.nn.init.zeros_(side.bias)
    angles = np.radians([0, 50, 90]), np.radians([10, 40, 80, 20])
    images, captions = (np.stack([np.cos(a), np.sin(a)], axis=1) for a in angles)
    by_image, by_caption = maps.retrieve(images, captions, np.array([0, 1, 1, 2]))
    # Image 0 finds its caption at 10° first, and image 1 finds 40° first. Image 2 has 80° and 40° before its
    # 20°.
    assert by_image == (2 / 3, 1, 1, 1)
    # Captions 10° and 40° find their images first. Caption 80° has 90° before its 50°, and 20° has 0° and 50°
    # before 90°.
    assert by_caption == (2 / 4, 1, 1, 1.5)


def test_the_maps_that_are_best_on_the_development_pairs_are_kept():
    x, y, owners = planted(40)
    dev = Pairs(*planted(25, seed=1))
    options = {"dim": 8, "batch_size": 30, "learning_rate": 0.02}  # too high: later maps are worse again
    each = [fit_maps(x, y, owners, **options, epochs=epochs) for epochs in range(1, 13)]
    scores = [sum(sum(found[:3]) for found in maps.retrieve(*dev)) for maps in each]
    best = 1 + int(np.argmax(scores))
    kept = fit_maps(x, y, owners, **options, epochs=12, dev=dev, patience=12)
    assert kept.epochs == best
    assert torch.equal(kept.image.weight, each[best - 1].image.weight)
    assert each[-1].epochs == 12
    # The first pass after which as many were in vain ends the training.
    in_vain = highest = first = 0
    for number, score in enumerate(scores, start=1):
        in_vain, highest, first = (0, score, number) if score > highest else (in_vain + 1, highest, first)
        if in_vain == 2:
            break
    assert fit_maps(x, y, owners, **options, epochs=12, dev=dev, patience=2).epochs == first


@pytest.mark.parametrize("owners", [range(30), [*range(12), *range(12), *range(6)], [0] * 9 + [1]])
def test_chance_is_what_random_orders_find(owners):
    owners = np.array(owners)
    images = owners.max() + 1
    generator = np.random.default_rng(0)
    ranks_of_images, ranks_of_captions = [], []
    for _ in range(4000):
        order = 1 + generator.permutation(len(owners))
        ranks_of_images += [order[owners == image].min() for image in range(images)]
        ranks_of_captions += [1 + generator.integers(images)]
    for found, ranks in zip(chance(owners, images), (ranks_of_images, ranks_of_captions), strict=True):
        shares = [np.mean(np.array(ranks) <= limit) for limit in (1, 5, 10)]
        assert found[:3] == pytest.approx(shares, abs=0.03)  # 4,000 draws err by 0.008
        assert found.median_rank == pytest.approx(np.median(ranks), abs=1)


def test_the_margin_loss_with_all_contrasts_and_with_a_sample():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(8, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    owners = torch.tensor([0, 1, 2, 3, 4, 5, 0, 1])
    scores, wanted = (x @ y.T).tolist(), 0.0
    for i in range(8):
        for j in range(8):
            if owners[i] != owners[j]:
                wanted += max(0, 0.2 - scores[i][i] + scores[i][j]) + max(
                    0, 0.2 - scores[i][i] + scores[j][i]
                )
    assert retrieval.margin_loss(x, y, owners, 0.2, 50).item() == pytest.approx(wanted / 8, rel=FLOAT32)
    torch.manual_seed(0)
    few = [retrieval.margin_loss(x, y, owners, 0.2, 2).item() for _ in range(2000)]
    # Two of six contrasts are sampled, or two of seven if no other row has the same owner.
    bounds = sorted((wanted / 8 * 2 / 7, wanted / 8 * 2 / 6))
    assert bounds[0] * 0.98 < np.mean(few) < bounds[1] * 1.02


def test_owners_that_do_not_fit_are_refused():
    x, y, owners = planted(10)
    for wrong in (owners[1:], owners + 1, owners - 1):
        with pytest.raises(ValueError, match="owners: want one of 10 images for each of 30 captions, got "):
            fit_maps(x, y, wrong)


@pytest.mark.parametrize("k", [1, 4, 100])
def test_nearest_rows_agree_with_a_search_of_the_whole_matrix(k, monkeypatch):
    monkeypatch.setattr(pools, "BLOCK_ROWS", 7)
    generator = np.random.default_rng(0)
    queries, pool = generator.standard_normal((3, 6)), generator.standard_normal((40, 6))
    pool[31] = 2 * pool[5]  # at the same cosine, so the earlier row comes first
    cosines = (queries @ pool.T) / np.linalg.norm(queries, axis=1)[:, None] / np.linalg.norm(pool, axis=1)
    rows, found = nearest_rows(queries, pool, k)
    assert rows.shape == (3, min(k, 40))
    np.testing.assert_allclose(found, -np.sort(-cosines, axis=1)[:, :k], atol=FLOAT32)
    np.testing.assert_allclose(np.take_along_axis(cosines, rows, axis=1), found, atol=FLOAT32)
    tied, _ = nearest_rows(pool[[5]], pool, 2)
    assert tied.tolist() == [[5, 31]]


def test_analogies_do_not_exclude_the_question():
    pool = np.array([[1.0, 0, 0], [0, 1, 0], [1, 0, 5], [0, 1, 5]])
    rows, cosines = analogies(pool[[0]], pool[[1]], pool[[2]], pool)
    assert rows.tolist() == [[3]]
    assert cosines[0, 0] == pytest.approx(1)
    same, _ = analogies(pool[[0]], pool[[0]], pool[[2]], pool)
    assert same.tolist() == [[2]]


def test_an_empty_pool_and_k_0_are_refused():
    for pool, k in ((np.ones((3, 2)), 0), (np.ones((0, 2)), 1)):
        with pytest.raises(ValueError, match="k: want "):
            nearest_rows(np.ones((1, 2)), pool, k)

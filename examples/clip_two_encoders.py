"""CLIP with two encoders and a learnt temperature, with DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/clip_two_encoders.py
    torchrun --nproc-per-node 2 examples/clip_two_encoders.py --out pictures.svg
    torchrun --nproc-per-node 8 examples/clip_two_encoders.py --data pairs.npz --batch-size 4096

Each rank encodes its own pictures and captions. The loss is that of all pairs, its gradients and that of the
temperature are those of one device with the whole batch, and only the captions' embeddings travel. A quarter
of the pairs is kept out of the training, and tells at its end how many pictures find their own caption.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from toy_data import pictures_and_captions, start_process_group

import fastqt


class CLIP(nn.Module):
    """Two encoders and their loss, whose temperature is a parameter that DDP reduces like the others."""

    def __init__(self, channels: int, words: int, dim: int = 64) -> None:
        super().__init__()
        self.picture_encoder = nn.Sequential(
            nn.Conv2d(channels, 16, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(512, dim),
        )
        self.caption_encoder = fastqt.nn.BagOfWords(words, dim)
        self.loss = fastqt.nn.CLIPLoss(group=dist.group.WORLD)

    def forward(self, pictures: Tensor, captions: Tensor) -> Tensor:
        lengths = torch.full((len(captions),), captions.shape[1], device=captions.device)
        return self.loss(self.picture_encoder(pictures), self.caption_encoder(captions, lengths))


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--data", help="an .npz file with arrays pictures (N, C, H, W) and captions (N, words)"
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=256, help="of all ranks together")
    parser.add_argument(
        "--out", help="an .svg file for unseen pictures and the scores of all places; for the toy data only"
    )
    settings = parser.parse_args(arguments)
    if settings.out and settings.data:
        parser.error("--out: want no --data with it, because it draws the toy data")
    return settings


@torch.no_grad()
def embeddings(clip: CLIP, pictures: Tensor, captions: Tensor) -> tuple[Tensor, Tensor]:
    """The embeddings of pictures and of captions at norm 1."""
    lengths = torch.full((len(captions),), captions.shape[1], device=captions.device)
    return F.normalize(clip.picture_encoder(pictures)), F.normalize(clip.caption_encoder(captions, lengths))


def retrieval(clip: CLIP, pictures: Tensor, captions: Tensor) -> str:
    """How many pictures find their own caption among all, in words; equal captions count alike."""
    seen, described = embeddings(clip, pictures, captions)
    scores = seen @ described.T
    own = scores.diagonal()[:, None]
    same = (captions[:, None] == captions).all(2)
    rank = ((scores > own) & ~same).sum(1)
    first, five = (int((rank < k).sum()) for k in (1, 5))
    told = f"{first} find their caption first, and {five} among five"
    return f"of {len(pictures)} unseen pictures, {told} (by chance 1 and 5)"


def draw(clip: CLIP, pictures: Tensor, out: str, shown: int = 5) -> None:
    """Draws pictures, and below each the scores of the captions of all 16 x 16 places."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fastqt"
    from matplotlib import pyplot

    places = torch.cartesian_prod(torch.arange(1, 17), torch.arange(17, 33)).to(pictures.device)
    seen, described = embeddings(clip, pictures[:shown], places)
    maps = (seen @ described.T).view(shown, 16, 16).cpu().numpy()

    figure, axes = pyplot.subplots(2, shown, figsize=(1.1 * shown, 2.5), layout="constrained")
    for n in range(shown):
        axes[0, n].imshow(pictures[n, 0].cpu().numpy(), cmap="gray")
        axes[1, n].imshow(maps[n], cmap="viridis")
    for axis, name in zip(axes[:, 0], ("picture", "captions"), strict=True):
        axis.set_ylabel(name, fontsize=12)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    figure.savefig(out, metadata={"Date": None})
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> tuple[nn.Module, list[float]]:
    """Trains both encoders; returns the model and the loss of each step."""
    settings, device = options(arguments), start_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    pictures, captions = pictures_and_captions(settings.data)
    trained = len(pictures) * 3 // 4

    torch.manual_seed(0)
    clip = CLIP(pictures.shape[1], int(captions.max()) + 1).to(device)
    model = DistributedDataParallel(clip)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    order, losses = torch.Generator().manual_seed(0), []
    for step in range(settings.steps):
        rows = torch.randperm(trained, generator=order)[: settings.batch_size].view(size, -1)[rank]
        optimizer.zero_grad()
        loss = model(pictures[rows].to(device), captions[rows].to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if rank == 0 and step % 10 == 0:
            print(f"step {step:4d}   loss {losses[-1]:.4f}   scale {clip.loss.scale.item():.2f}", flush=True)

    if rank == 0:
        unseen = pictures[trained:].to(device), captions[trained:].to(device)
        print(retrieval(clip, *unseen), flush=True)
        if settings.out:
            draw(clip, unseen[0], settings.out)
    return model, losses


if __name__ == "__main__":
    main()
    dist.destroy_process_group()

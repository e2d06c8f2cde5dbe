"""GLOSS's losses: which words a latent vector names."""

from __future__ import annotations

from torch import Tensor

from fastqt.checks import as_ids, check_embeddings, check_option
from fastqt.functional import REDUCTIONS, contrastive_loss, sigmoid_loss
from fastqt.losses.common import reduced, row_numbers
from fastqt.targets import Bags


def gloss_bow_loss(
    latents: Tensor,
    weight: Tensor,
    bias: Tensor,
    token_ids: Tensor,
    offsets: Tensor,
    *,
    reduction: str = "mean",
    memory: str = "fast",
    backend: str | None = None,
) -> Tensor:
    """Binary cross-entropy, summed over the vocabulary, of which words a sentence's latent vector names.

    Args:
        latents: (B, D) floating point.
        weight: (V, D), bias: (V,): the decoder, of logits latents @ weight.T + bias.
        token_ids: (T,) integers in [0, V), all sentences' words one after the other; one that is named
            twice counts once.
        offsets: (B,) integers, where each sentence's words begin, as of `torch.nn.EmbeddingBag`.

    Source: GLOSS, generative latent optimisation of sentence representations: the bag-of-words decoder.
    """
    check_embeddings(latents=latents, weight=weight)
    targets = Bags("token_ids", token_ids, offsets)
    return sigmoid_loss(
        latents, weight, targets, bias=bias, reduction=reduction, memory=memory, backend=backend
    )


def gloss_pos_loss(
    latents: Tensor,
    positions: Tensor,
    weight: Tensor,
    bias: Tensor,
    token_ids: Tensor,
    lengths: Tensor,
    *,
    reduction: str = "mean",
    memory: str = "fast",
    backend: str | None = None,
) -> Tensor:
    """Cross-entropy, summed over a sentence's places, of the word at each place given its latent vector.

    Args:
        latents: (B, D) floating point.
        positions: (L, D), a vector for each place, added to the latent one.
        weight: (V, D), bias: (V,): the decoder, of logits (latent + position) @ weight.T + bias.
        token_ids: (B, L) integers in [0, V), padded on the right with anything.
        lengths: (B,) integers in [0, L].

    Source: GLOSS, generative latent optimisation of sentence representations: the positional decoder.
    """
    check_embeddings(latents=latents, positions=positions, weight=weight)
    check_option("reduction", reduction, REDUCTIONS)
    B, L, device = len(latents), len(positions), latents.device
    if tuple(token_ids.shape) != (B, L):
        raise ValueError(f"token_ids: want shape (B, L) = ({B}, {L}), got {tuple(token_ids.shape)}")
    lengths = as_ids("lengths", lengths).to(device)
    if lengths.numel() != B or (lengths < 0).any() or (lengths > L).any():
        raise ValueError(f"lengths: want one in 0..{L} for each of B={B} sentences")
    sentence, place = (row_numbers(L, device) < lengths[:, None]).nonzero(as_tuple=True)
    if not len(sentence):  # no word at all
        return reduced(latents.sum(1) * 0, reduction)
    loss = contrastive_loss(
        latents[sentence] + positions[place],
        weight,
        token_ids.to(device)[sentence, place],
        diagonal="keep",
        bias=bias,
        reduction="none" if reduction == "none" else "sum",
        memory=memory,
        backend=backend,
    )
    if reduction == "none":
        return loss.new_zeros(B).index_add(0, sentence, loss)
    return loss / B if reduction == "mean" else loss

"""Prediction of masked words: which tokens are masked, and the head that predicts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastqt.checks import check_size
from fastqt.functional import contrastive_loss
from fastqt.nn.encoders import check_batch
from fastqt.nn.init import reset_children

CHOSEN, MASKED, RANDOM = 0.15, 0.8, 0.1  # of all tokens; of the chosen ones


@runtime_checkable
class TokenEncoder(Protocol):
    """A sentence encoder with a state for each token. `Transformer` and `HuggingFaceEncoder` are such."""

    embedding_dim: int

    def states(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """The states (n, E) of all n tokens that are no padding, one sentence after the other."""
        ...

    @property
    def word_table(self) -> Tensor:
        """(V, E), the vectors that the encoder reads for its token ids."""
        ...


class Masking(NamedTuple):
    """A batch with words to predict."""

    tokens: Tensor  # (B, L) int64, some of them replaced
    chosen: Tensor  # (B, L) bool, which words are to be predicted


def mask_words(
    tokens: Tensor, lengths: Tensor, *, vocab_size: int, mask_id: int, kept: Sequence[int] = ()
) -> Masking:
    """Chooses words to predict as BERT does, by torch's default generator of the tokens' device.

    Each token is chosen with probability 0.15. A chosen one becomes the mask token with probability 0.8 and a
    random word with 0.1; otherwise it stays as it is.

    Args:
        tokens: (B, L) int64, token ids.
        lengths: (B,) int64 in 0..L.
        vocab_size: random words are drawn from ids below it.
        mask_id: the id of the mask token.
        kept: ids that are never chosen, such as those of special tokens.

    Returns:
        The tokens with masked words, and which were chosen.

    Raises:
        ValueError, TypeError: as in `Encoder.forward`, or a size below 1.

    Example:
        >>> import torch, fastqt
        >>> tokens, lengths = torch.tensor([[5, 7, 2], [3, 0, 0]]), torch.tensor([3, 1])
        >>> masking = fastqt.nn.mask_words(tokens, lengths, vocab_size=100, mask_id=99)
        >>> masking.tokens.shape, masking.chosen.dtype
        (torch.Size([2, 3]), torch.bool)

    Source: Devlin et al., "BERT" (arXiv:1810.04805), section 3.1; the code of Gao et al. (arXiv:2104.08821).
    """
    check_batch(tokens, lengths)
    check_size("vocab_size", vocab_size)
    inside = torch.arange(tokens.shape[1], device=tokens.device) < lengths.unsqueeze(1)
    may_be_chosen = inside & torch.isin(tokens, tokens.new_tensor(list(kept)), invert=True)
    draws, kinds = torch.rand((2, *tokens.shape), device=tokens.device)
    words = torch.randint(vocab_size, tokens.shape, device=tokens.device)
    chosen = may_be_chosen & (draws < CHOSEN)
    masked = tokens.masked_fill(chosen & (kinds < MASKED), mask_id)
    is_random = chosen & (kinds >= MASKED) & (kinds < MASKED + RANDOM)
    return Masking(masked.where(~is_random, words), chosen)


class MaskedWordHead(nn.Module):
    """Predicts words from token states, as BERT's head does: dense, GELU, layer norm, and the word table.

    The output layer is the encoder's own table of word vectors and a bias, so that it adds V numbers and not
    V E, and trains the vectors that the encoder reads.

    Args:
        vocab_size: V, the number of rows of the table.
        dim: E, the width of states and word vectors.

    Raises:
        ValueError, TypeError: a size that is no integer of at least 1.

    Example:
        >>> import torch, fastqt
        >>> encoder = fastqt.nn.Transformer(100, 16, layers=1, heads=4, feedforward=32)
        >>> model = fastqt.nn.SimCSE(encoder, head=fastqt.nn.MaskedWordHead(100, 16))
        >>> tokens, lengths = torch.tensor([[5, 7, 2], [3, 0, 0]]), torch.tensor([3, 1])
        >>> masking = fastqt.nn.mask_words(tokens, lengths, vocab_size=99, mask_id=99)
        >>> model.masked_word_loss(tokens, lengths, masking).shape
        torch.Size([])

    Source: Devlin et al., "BERT" (arXiv:1810.04805), and its code.
    """

    def __init__(self, vocab_size: int, dim: int) -> None:
        for name, size in (("vocab_size", vocab_size), ("dim", dim)):
            check_size(name, size)
        super().__init__()
        self.dense = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def reset_parameters(self) -> None:
        """Sets the initial values again."""
        reset_children(self)
        nn.init.zeros_(self.bias)

    def forward(self, states: Tensor, table: Tensor, words: Tensor) -> Tensor:
        """The cross-entropy of words, summed. The matrix of n x V logits is never stored as a whole.

        Args:
            states: (n, E) the states of n tokens.
            table: (V, E) word vectors.
            words: (n,) int64, the words to predict.

        Returns:
            A scalar; 0 with gradients of 0 if n is 0.

        Raises:
            ValueError, TypeError: as in `fastqt.contrastive_loss`.
        """
        if not len(states):  # On several processes all parameters have a gradient on each, or on none.
            parts = (states, table, *self.parameters())
            return torch.stack([0 * part.sum() for part in parts]).sum()
        hidden = self.norm(F.gelu(self.dense(states)))
        return contrastive_loss(hidden, table, words, diagonal="keep", bias=self.bias, reduction="sum")


def masked_word_loss(
    encoder: TokenEncoder, head: MaskedWordHead, tokens: Tensor, lengths: Tensor, masking: Masking
) -> Tensor:
    """The cross-entropy of all chosen words, summed, from the states of the sentences with masked words.

    Tokens (B, L) and lengths (B,) are the sentences as they were, and `masking` is what `mask_words` returned
    for them. The encoder has the head's sizes: width E and a table (V, E). Errors as of `Encoder.forward`.
    """
    inside = torch.arange(tokens.shape[1], device=tokens.device) < lengths.unsqueeze(1)
    states = encoder.states(masking.tokens, lengths)[masking.chosen[inside]]
    loss: Tensor = head(states, encoder.word_table, tokens[masking.chosen])
    return loss

"""SPLADE's pooling as a module, with the decoder of a masked language model."""

from __future__ import annotations

from torch import Tensor, nn

from fastqt.splade import splade_pool


class SpladePool(nn.Module):
    """`fastqt.splade_pool` by the last linear layer of a masked language model.

    With transformers that layer is `model.get_output_embeddings()`, whose weight is often the table of word
    vectors too. It stays a part of the model, and is not called: what is pooled are the states before it.

    Args:
        decoder: the layer, from D numbers to V words, with or without a bias.

    Raises:
        TypeError: decoder is no `torch.nn.Linear`.

    Example:
        >>> import torch, fastqt
        >>> pool = fastqt.nn.SpladePool(torch.nn.Linear(16, 100))
        >>> states, mask = torch.randn(2, 7, 16), torch.arange(7) < torch.tensor([[7], [4]])
        >>> pool(states, mask).shape
        torch.Size([2, 100])
    """

    def __init__(self, decoder: nn.Linear) -> None:
        super().__init__()
        if not isinstance(decoder, nn.Linear):
            raise TypeError(f"decoder: want a torch.nn.Linear, got {type(decoder).__name__}")
        self.decoder = decoder

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """The weights of all words, (B, V), of states (B, L, D) and a mask (B, L) as of `splade_pool`."""
        return splade_pool(hidden, self.decoder.weight, self.decoder.bias, mask)

"""Skip-thoughts: a model that generates the neighbours of a sentence; the baseline of QuickThoughts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from fastqt.checks import check_tensor
from fastqt.functional import contrastive_loss
from fastqt.nn.encoders import GRUEncoder, check_batch, pack_tokens
from fastqt.nn.init import PaperGRU, embedding_table, reset_children


class SkipThoughts(nn.Module):
    """A GRU that encodes a sentence, and two GRUs that decode the previous and the next sentence from it.

    The encoder may read a sentence in both directions; then each has half the width.

    This is the form whose parameters Logeswaran and Lee count: encoder and decoders share one table of word
    vectors, the sentence vector is the initial state of each decoder, and each decoder has its own output
    weights, without a bias.

    Args:
        vocab_size, word_dim, hidden_size, bidirectional, reset_after, sparse: as in `GRUEncoder`; V, W and H
            are the numbers of token ids and the widths of word and of sentence vectors.

    Raises:
        ValueError: an odd hidden_size with `bidirectional`.

    Example:
        >>> import torch, fastqt
        >>> model = fastqt.nn.SkipThoughts(100, 16, 32)
        >>> tokens, lengths = torch.tensor([[5, 7, 2], [3, 0, 0]]), torch.tensor([3, 1])
        >>> model.loss(tokens, lengths).shape, model.encode(tokens, lengths).shape
        (torch.Size([]), torch.Size([2, 32]))

    Source: Kiros et al., "Skip-thought vectors" (arXiv:1506.06726); the number of parameters: Logeswaran and
    Lee (arXiv:1803.02893).
    """

    def __init__(
        self,
        vocab_size: int,
        word_dim: int = 300,
        hidden_size: int = 1000,
        *,
        bidirectional: bool = False,
        reset_after: bool = True,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        sizes = vocab_size, word_dim, hidden_size
        self.encoder = GRUEncoder(*sizes, bidirectional=bidirectional, reset_after=reset_after, sparse=sparse)
        self.previous = Decoder(*sizes, reset_after=reset_after)
        self.next = Decoder(*sizes, reset_after=reset_after)

    reset_parameters = reset_children

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """The sentence vectors (B, H); arguments and errors as in `Encoder.forward`."""
        return self.encoder(tokens, lengths)

    @property
    def embedding_dim(self) -> int:
        """H, the width of the vectors that `encode` returns."""
        return self.encoder.embedding_dim

    @torch.no_grad()
    def encode(self, tokens: Tensor, lengths: Tensor, *, normalize: bool = True) -> Tensor:
        """The sentence vectors for downstream use: those of the encoder, (B, H), without gradient.

        `normalize` scales each vector to norm 1; a vector of zeros stays zero. The sentences, and the errors,
        are as in `Encoder.forward`.
        """
        vectors = self(tokens, lengths)
        return F.normalize(vectors, dim=1) if normalize else vectors

    def loss(self, tokens: Tensor, lengths: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """The mean cross-entropy of a neighbour's word, given the sentence and the words before that word.

        The logits, a matrix of words by vocabulary, are never stored as a whole.

        Args:
            tokens, lengths: as in `Encoder.forward`, of consecutive sentences.
            document_ids: (B,) int64; sentences of different documents are no neighbours. By default all
                sentences are of one document.

        Returns:
            A scalar.

        Raises:
            ValueError, IndexError: as in `Encoder.forward`, or no word in any neighbour.
        """
        loss, words = self.summed_loss(tokens, lengths, document_ids)
        if words == 0:
            raise ValueError("lengths: want at least two sentences, with words, got no word to predict")
        return loss / words

    def summed_loss(
        self, tokens: Tensor, lengths: Tensor, document_ids: Tensor | None = None
    ) -> tuple[Tensor, int]:
        """The cross-entropy of all words of all neighbours, a scalar, and how many words these are.

        Without a word to predict both are 0, and all parameters have gradients of zeros. Arguments and errors
        are those of `loss`.
        """
        check_batch(tokens, lengths)
        first = torch.arange(len(tokens) - 1 if len(tokens) else 0, device=tokens.device)
        if document_ids is not None:
            check_tensor("document_ids", document_ids)
            if document_ids.shape != lengths.shape or document_ids.dtype != torch.int64:
                raise ValueError(
                    f"document_ids: want ({len(tokens)},) int64, "
                    f"got {tuple(document_ids.shape)} {document_ids.dtype}"
                )
            first = (document_ids[1:] == document_ids[:-1]).nonzero()[:, 0]
        before, after = first, first + 1
        vectors, table = self(tokens, lengths), self.encoder.embedding
        loss = self.previous.loss(vectors[after], table, tokens[before], lengths[before])
        loss = loss + self.next.loss(vectors[before], table, tokens[after], lengths[after])
        return loss, int(lengths[before].sum() + lengths[after].sum())


class Decoder(nn.Module):
    """Predicts a sentence word by word: a GRU over the previous words, which starts from a given state."""

    def __init__(self, vocab_size: int, word_dim: int, hidden_size: int, *, reset_after: bool) -> None:
        super().__init__()
        self.recurrent = PaperGRU(word_dim, hidden_size, bias="single", reset_after=reset_after)
        self.output = nn.Parameter(embedding_table(vocab_size, hidden_size).weight)

    def reset_parameters(self) -> None:
        """Draws the initial values again."""
        reset_children(self)
        nn.init.uniform_(self.output, -0.1, 0.1)

    def loss(
        self,
        states: Tensor,  # (B, H)
        table: nn.Embedding,  # (V, W)
        tokens: Tensor,  # (B, L)
        lengths: Tensor,  # (B,)
    ) -> Tensor:
        """The cross-entropy, summed over all words of all sentences."""
        targets, batch_sizes, order = pack_tokens(tokens, lengths)
        if len(targets) == 0:
            # Processes that train together add up their gradients, so each of them has to have all of them.
            return sum((each.sum() for each in self.parameters()), states.sum()) * 0
        nonempty = int(batch_sizes[0])
        previous, _, _ = pack_tokens(tokens.roll(1, dims=1), lengths)
        # The first step has no previous word and reads zeros.
        words = table(previous[nonempty:])
        words = torch.cat([words.new_zeros(nonempty, table.embedding_dim), words])
        initial = states.index_select(0, order[:nonempty]).unsqueeze(0)
        output, _ = self.recurrent(PackedSequence(words, batch_sizes), initial)
        return contrastive_loss(output.data, self.output, targets, diagonal="keep", reduction="sum")

"""MaxSim by kernels: of some queries the sums of maxima, and gradients from the places of the maxima."""

from __future__ import annotations

import torch
from torch import Tensor

from fastqt.devices import accumulation_dtype


class TokenKernels:
    """Queries and documents of a vector for each token, as kernels read them.

    Args:
        queries: (N, T, D), contiguous.
        documents: (M, U, D), contiguous.
        dtype: in which products read both.
        bias: (M, U), added to products: 0, or minus infinity where there is no token. None: all are tokens.
    """

    def __init__(self, queries: Tensor, documents: Tensor, dtype: torch.dtype, bias: Tensor | None) -> None:
        from fastqt.kernels.launch import precision
        from fastqt.kernels.maxsim import operand

        self.T, self.U = queries.shape[1], documents.shape[1]
        tokens = queries.flatten(0, 1), documents.flatten(0, 1)
        rounded = precision(dtype) == "tf32"
        self.queries, self.documents = (operand(x, dtype, rounded=rounded) for x in tokens)
        # What gradients are sums of. TF32 is of products alone.
        self.summed_queries, self.summed_documents = self.queries, self.documents
        if rounded:
            self.summed_queries, self.summed_documents = (operand(x, dtype, rounded=False) for x in tokens)

        self.bias, self.lengths = bias, None
        if bias is not None:
            numbers = torch.arange(1, self.U + 1, dtype=torch.int32, device=bias.device)
            self.lengths = torch.where(bias == 0, numbers, 0).amax(1)

    def maxima(self, rows: slice, wants_places: bool) -> tuple[Tensor, Tensor | None]:
        """The sums of maxima of some queries, (n, M), and in which of a document's tokens they are.

        The places are (M, n T) int16 or int32; of equal maxima it is the first one's.
        """
        from fastqt.kernels.maxsim import maxima

        tokens = self.queries[rows.start * self.T : rows.stop * self.T]
        largest, places = maxima(
            tokens, self.documents, self.U, self.bias, self.lengths, wants_places=wants_places
        )
        sums = largest.view(len(largest), -1, self.T).sum(2, dtype=accumulation_dtype(largest.device))
        return sums.T.contiguous(), places

    def add_gradients(
        self,
        rows: slice,
        places: Tensor,
        weights: Tensor,  # (n, M): the derivatives of the loss by the sums of maxima
        d_queries: Tensor | None,  # (N, T, D) float32, of which these queries' gradients are written
        d_documents: Tensor | None,  # (M, U, D) float32
    ) -> None:
        """Adds the gradients of the sums of maxima of some queries."""
        from fastqt.kernels.maxsim_gradients import add_gradients_of_documents, gradients_of_queries

        weights = weights.float().contiguous()
        if d_queries is not None:
            gradients_of_queries(self.summed_documents, places, weights, d_queries[rows].flatten(0, 1))
        if d_documents is not None:
            tokens = self.summed_queries[rows.start * self.T : rows.stop * self.T]
            add_gradients_of_documents(tokens, places, self.lengths, weights, d_documents)

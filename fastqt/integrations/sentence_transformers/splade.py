"""SPLADE models of the library that pool the states of tokens, without the logits of all of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.rnn import pad_sequence

from fastqt.splade import splade_pool

CHECKED = 2  # tokens by which it is checked what a model does after its decoder


class _Decoder(nn.Linear):
    """A decoder that gives the states that it is given: its weights are read by the pooling."""

    def forward(self, states: Tensor) -> Tensor:
        return states


def pool_without_logits(model: SparseEncoder) -> None:
    """Makes a SPLADE model compute its vectors by `fastqt.splade_pool`, in training and in `encode`.

    The model's masked language model then returns the states before its last linear layer, the decoder, and
    the pooling multiplies these in tiles. Parameters, their names and the files that `save` writes stay those
    of the library, which loads them without fastqt. A model that is loaded pools as the library does until
    this is called again.

    Args:
        model: a SparseEncoder of a masked language model and a SpladePooling of the strategy "max".

    Raises:
        TypeError: another model.
        ValueError: another strategy, or a language model that does more after its decoder. The model is then
            as it was.

    Example:
        >>> import transformers
        >>> from sentence_transformers import SparseEncoder
        >>> from fastqt.integrations.sentence_transformers import pool_without_logits
        >>> _ = transformers.BertForMaskedLM.from_pretrained("bert").save_pretrained("bert")
        >>> model = SparseEncoder("bert", device="cpu", local_files_only=True)
        >>> before = model.encode(["the cat sat", "a mat"])
        >>> pool_without_logits(model)
        >>> bool((model.encode(["the cat sat", "a mat"]) - before).to_dense().abs().max() < 1e-5)
        True
    """
    if not isinstance(model, SparseEncoder):
        raise TypeError(f"model: want a SparseEncoder, got {type(model).__name__}")
    modules = list(model)
    language_model = getattr(modules[0], "model", None)
    decoder = getattr(language_model, "get_output_embeddings", lambda: None)()
    if len(modules) != 2 or not isinstance(modules[1], SpladePooling) or not isinstance(decoder, nn.Linear):
        names = ", ".join(type(module).__name__ for module in modules)
        raise TypeError(f"model: want a masked language model and SpladePooling, got {names}")

    pooling = modules[1]
    if pooling.pooling_strategy != "max":
        raise ValueError(f"model: want the pooling_strategy 'max', got {pooling.pooling_strategy!r}")
    if isinstance(decoder, _Decoder):
        return
    _let_states_through(language_model, decoder)
    # Not a method, so that copies and pickles of the model have the decoder of their own.
    pooling.forward = partial(_pooled, pooling, decoder)  # type: ignore[method-assign]  # of this module alone


@torch.no_grad()
def _let_states_through(language_model: Any, decoder: nn.Linear) -> None:
    """Makes a decoder return what it is given; ValueError if that is not all that follows the states."""
    ids = torch.arange(CHECKED, device=decoder.weight.device)[None]
    was_training = language_model.training
    language_model.eval()
    logits = language_model(input_ids=ids).logits
    kind = type(decoder)
    decoder.__class__ = _Decoder
    states = language_model(input_ids=ids).logits
    language_model.train(was_training)

    same = states.shape[2] == decoder.in_features
    if not same or not torch.allclose(linear(states, decoder.weight, decoder.bias), logits, 1e-3, 1e-3):
        decoder.__class__ = kind
        raise ValueError("model: want logits that are the decoder's output, got a model that changes them")


def _pooled(pooling: SpladePooling, decoder: nn.Linear, features: dict[str, Tensor]) -> dict[str, Tensor]:
    """As `SpladePooling.forward`, of the states of tokens in place of their logits."""
    states = features["token_embeddings"]
    if "cu_seq_lens_q" in features:  # one text after the other, without padding
        lengths = features["cu_seq_lens_q"].diff()
        states = pad_sequence(states.squeeze(0).split(lengths.tolist()), batch_first=True)
        mask = torch.arange(states.shape[1], device=states.device) < lengths[:, None]
    else:
        mask = features["attention_mask"].bool()

    pooled = splade_pool(states, decoder.weight, decoder.bias, mask)
    if pooling.activation_function == "log1p_relu":
        pooled = pooled.log1p()
    if pooling.embedding_dimension is None:
        pooling.embedding_dimension = pooled.shape[1]
    features["sentence_embedding"] = pooled
    return features

"""The sentence encoders that a training can name, one record each."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class EncoderKind:
    """What settings, training and export have to know of an encoder.

    What needs torch is in its form: how it is made of the settings, and exported.
    """

    name: str  # as --encoder has it
    encoder: str  # its class in fastqt
    form: str  # the module in fastqt/sentences/runs and the class in it, an `EncoderForm`
    needs: tuple[str, ...] = ()  # the settings without which it cannot be made
    bidirectional: bool = False  # whether each of two directions has half of hidden_size
    has_heads: bool = False  # whether it has attention heads, each with an equal part of word_dim
    has_states: bool = False  # whether it has a state for each word, from which masked words are predicted
    is_table: bool = False  # whether it has no weights but word vectors
    is_mean: bool = False  # whether a sentence's vector is the mean of its word vectors, and not the sum
    is_library_s: bool = False  # whether modules of sentence-transformers compute the same vectors
    channel: str = ""  # of an encoder of two channels, one of them on frozen word vectors: the kind of both
    parts: tuple[str, ...] = ()  # of a model of several models: the encoder of each


BOW = EncoderKind("bow", "BagOfWords", "encoders.BagOfWordsForm", is_table=True)
STATIC = replace(BOW, name="static", needs=("vocabulary",), is_mean=True, is_library_s=True)
GRU = EncoderKind("gru", "GRUEncoder", "encoders.GRUForm")
LSTM = EncoderKind("lstm", "LSTMEncoder", "encoders.LSTMForm")
TRANSFORMER = EncoderKind(
    "transformer",
    "Transformer",
    "encoders.TransformerForm",
    has_heads=True,
    has_states=True,
)
CHECKPOINT = EncoderKind(
    "huggingface",
    "HuggingFaceEncoder",
    "checkpoint_form.CheckpointForm",
    needs=("checkpoint",),
    has_states=True,
    is_library_s=True,
)
CHANNELS = EncoderKind("mc-gru", "Combine", "encoders.ChannelsForm", needs=("vectors",), channel="gru")

# By the name. A new encoder has its class in fastqt/nn, its form in fastqt/sentences/runs, and a record
# here.
ENCODERS = {
    kind.name: kind
    for kind in (
        BOW,
        STATIC,
        GRU,
        replace(GRU, name="bigru", bidirectional=True),
        LSTM,
        replace(LSTM, name="bilstm", bidirectional=True),
        TRANSFORMER,
        CHECKPOINT,
        replace(CHANNELS, name="mc-bow", channel="bow"),
        CHANNELS,
        replace(CHANNELS, name="mc-bigru", channel="bigru", bidirectional=True),
        EncoderKind("combine", "", "", parts=("gru", "bigru"), bidirectional=True),
    )
}

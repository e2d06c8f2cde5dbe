"""Nonsense for any argument of a constructor is refused in words that begin with the argument's name.

The replacements of sentence_transformers' losses take what the library takes, and refuse some in its words.
Of them it is tested that no error is Python's own, which names no argument.
"""

import math
import re

import pytest
from torch import nn

import fastqt
from fastqt.errors import InputError

NONSENSE = (None, "nonsense", 0.5, [1], -1, math.nan)
EVERY = "cache_labels rank world_size use_horovod memory"
# The arguments of each constructor, by which of these values they take.
NO_VALUE = {
    "open_clip.ClipLoss": f"local_loss gather_with_grad {EVERY}",
    "open_clip.SigLipLoss": f"{EVERY} chunk_size",
    "lightning.ContrastiveModule": "encoders loss",
    "metric_learning.NTXentLoss": "memory fallback",
    "metric_learning.SupConLoss": "memory fallback",
    "metric_learning.CrossBatchMemory": "loss embedding_size memory_size",
    "huggingface.ContrastiveCollator": "tokenizer max_length",
    "huggingface.HuggingFaceEncoder": "model pooling max_length",
    "huggingface.CheckpointVocabulary": "tokenizer config max_length",
    "huggingface.untrained": "directory",
    "huggingface.ContrastiveModel": "encoder loss",
    "sentence_transformers.SentenceTransformerLoss": "model loss",
    "sentence_transformers.CachedLoss": "model loss mini_batch_size check",
}
OR_NONE = {
    "open_clip.ClipLoss": "backend",
    "open_clip.SigLipLoss": "dist_impl backend",
    "lightning.ContrastiveModule": "group",
    "metric_learning.NTXentLoss": "backend distance reducer embedding_regularizer",
    "metric_learning.SupConLoss": "backend distance reducer embedding_regularizer",
    "metric_learning.CrossBatchMemory": "miner",
    "huggingface.ContrastiveCollator": "columns",
    "huggingface.HuggingFaceEncoder": "tokenizer",
    "huggingface.ContrastiveModel": "pooling max_length group",
}
OR_HALF = {
    "lightning.ContrastiveModule": "learning_rate weight_decay",
    "metric_learning.NTXentLoss": "temperature",
    "metric_learning.SupConLoss": "temperature",
    "huggingface.ContrastiveModel": "scale",
    "sentence_transformers.SentenceTransformerLoss": "scale",
}
TABLE = [
    (constructor, name, taken)
    for table, taken in ((NO_VALUE, ()), (OR_NONE, (None,)), (OR_HALF, (0.5,)))
    for constructor, names in table.items()
    for name in names.split()
]
LIBRARYS = (
    *("MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"),
    *("GISTEmbedLoss", "CachedGISTEmbedLoss"),
)
WORDLESS = re.compile(
    r"subscriptable|not supported between|not iterable|unhashable|unpack|has no attribute|argument 'size'"
)
LIBRARIES = {"metric_learning": "pytorch_metric_learning", "huggingface": "transformers"}


def module_of(integration):
    pytest.importorskip(LIBRARIES.get(integration, integration) if integration != "open_clip" else "torch")
    return __import__(f"fastqt.integrations.{integration}", fromlist=["_"])


@pytest.fixture(scope="module")
def right(checkpoint):
    """Arguments with which each constructor works, by its name."""

    def of(constructor):
        integration, name = constructor.split(".")
        module = module_of(integration)
        if integration == "lightning":
            return {"encoders": nn.Linear(2, 2), "loss": fastqt.nn.SimCSELoss()}
        if name == "CrossBatchMemory":
            return {"loss": module.SupConLoss(), "embedding_size": 4}
        if name in ("HuggingFaceEncoder", "untrained"):
            return {"model" if name[0] == "H" else "directory": checkpoint}
        if name == "ContrastiveModel":
            return {"encoder": checkpoint}
        if integration == "huggingface":
            encoder = module.HuggingFaceEncoder(checkpoint)
            given = {"tokenizer": encoder.tokenizer, "config": encoder.model.config, "max_length": 8}
            return given if name == "CheckpointVocabulary" else {"tokenizer": encoder.tokenizer}
        return {"model": nn.Linear(2, 2)} if integration == "sentence_transformers" else {}

    return of


@pytest.mark.parametrize(("constructor", "name", "taken"), TABLE)
def test_nonsense_is_refused_by_the_arguments_name(constructor, name, taken, right):
    given = right(constructor)
    integration, kind = constructor.split(".")
    construct = getattr(module_of(integration), kind)
    construct(**given)
    for value in NONSENSE:
        if value in taken:
            construct(**{**given, name: value})
            continue
        with pytest.raises((ValueError, TypeError, InputError), match=f"^{name}: want .*, got "):
            construct(**{**given, name: value})


@pytest.mark.parametrize("kind", LIBRARYS)
def test_a_replacement_names_what_its_library_fails_at(kind, checkpoint):
    library = pytest.importorskip("sentence_transformers")
    construct = getattr(module_of("sentence_transformers"), kind)
    model = library.SentenceTransformer(str(checkpoint), device="cpu", local_files_only=True)
    given = {"model": model, **({"guide": model} if "GIST" in kind else {})}
    signature = construct.__init__.__wrapped__.__code__
    for name in signature.co_varnames[1 : signature.co_argcount]:
        for value in NONSENSE:
            try:
                construct(**{**given, name: value})
            except (ValueError, TypeError) as error:
                assert not WORDLESS.search(str(error)), (name, value, error)  # noqa: PT017
    if kind.startswith("Cached"):  # Of too few tokens the library says so itself.
        with pytest.raises(ValueError, match=r"^mini_batch_num_tokens must be a positive integer or None\.$"):
            construct(**given, mini_batch_num_tokens=0)
        with pytest.raises(TypeError, match=r"^mini_batch_num_tokens: want an integer, got 'many'"):
            construct(**given, mini_batch_num_tokens="many")

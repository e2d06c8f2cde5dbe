"""The optional libraries of which fastqt needs a certain version."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

# By the module that is imported: what pip calls it, the oldest version, and the extra, as in pyproject.toml.
LIBRARIES = {
    "faiss": ("faiss-cpu", "1.10", "faiss"),
    "lightning": ("lightning", "2.5", "lightning"),
    "pyarrow": ("pyarrow", "18", "datasets"),
    "pytorch_metric_learning": ("pytorch-metric-learning", "2.8", "metric"),
    "sentence_transformers": ("sentence-transformers", "6", "st"),
    "tensorboard": ("tensorboard", "2.15", "tensorboard"),
    "transformers": ("transformers", "5", "hf"),
    "wandb": ("wandb", "0.18", "wandb"),
}


def load_library(module: str) -> Any:
    """The module of an optional library; ImportError says what to install where it is missing or too old."""
    name, oldest, extra = LIBRARIES[module]
    try:
        library = import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:  # the library is there, and what it needs itself is not
            raise
        raise ImportError(_refusal(name, oldest, extra, "none"), name=module) from error
    version = str(getattr(library, "__version__", oldest))
    if _numbers(version) < _numbers(oldest):
        raise ImportError(_refusal(name, oldest, extra, version), name=module)
    return library


def _refusal(name: str, oldest: str, extra: str, version: str) -> str:
    return f"want {name} >= {oldest}, got {version}: pip install 'fastqt[{extra}]'"


def _numbers(version: str) -> list[int]:
    """The numbers at the beginning of a version, such as [6, 0] of "6.0.dev1"."""
    return [int(number) for number in re.split(r"[^\d.]", version)[0].split(".") if number]

"""Each public class of the integrations has an example in its docstring, which runs where its library is."""

import importlib

import pytest

from tests.shared.doctests import examples_of, own, run_examples

# The library that each wants.
WANTED = {
    "huggingface": "transformers",
    "lightning": "lightning",
    "metric_learning": "pytorch_metric_learning",
    "open_clip": None,
    "pylate": None,
    "sentence_transformers": "sentence_transformers",
}


def public(integration):
    """The module, and the names that it offers; a module of one class has no `__all__`."""
    if WANTED[integration] is not None:
        pytest.importorskip(WANTED[integration], reason=f"{WANTED[integration]} is not installed")
    module = importlib.import_module(f"fastqt.integrations.{integration}")
    return module, own(module)


@pytest.mark.slow
@pytest.mark.parametrize("integration", WANTED)
def test_each_public_class_has_an_example_that_runs(integration, checkpoint, tmp_path, monkeypatch):
    (tmp_path / "bert").symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    module, names = public(integration)
    assert names
    assert [name for name in names if not examples_of(module, name)] == []
    assert "".join(run_examples(module, name) for name in names) == ""

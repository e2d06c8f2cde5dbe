"""The stored pages of predictions show what the stored JSON gives."""

import json

import pytest

from benchmarks.predict import cuda_estimate, estimate


@pytest.mark.parametrize("module", [estimate, cuda_estimate], ids=lambda module: module.DOCUMENT.name)
def test_page_is_rendered_from_its_stored_inputs(module):
    page = module.rendered(json.loads(module.STORED.read_text()))
    assert page == module.DOCUMENT.read_text(), f"render it again: python -m {module.__name__}"

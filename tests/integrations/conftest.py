"""What the tests of several libraries load."""

import pytest

from tests.shared.tiny_bert import write_tiny_bert


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The directory of a model with random weights and its tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_tiny_bert(folder)
    return folder

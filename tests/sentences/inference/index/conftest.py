"""One thread for faiss."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def one_thread_of_faiss():
    """Its threads wait actively, as those of torch do: on a busy machine small searches would be slow."""
    faiss = pytest.importorskip("faiss", reason="the extra faiss is not installed")
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(before)

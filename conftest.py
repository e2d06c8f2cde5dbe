"""Adds `pytest --benchmark`: run the tests that use the `benchmark` fixture, and only those."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--benchmark",
        action="store_true",
        help="select the tests that use the benchmark fixture, and time them",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--benchmark"):
        config.option.benchmark_disable = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--benchmark"):
        return
    chosen = [item for item in items if "benchmark" in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen

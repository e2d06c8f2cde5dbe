"""mypy refuses typical mistakes, each for its reason, and accepts the same uses once they are right."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import fastqt
from fastqt import options
from fastqt.cached.encoding import CHECKS
from fastqt.compiling import TARGETS
from fastqt.distributed import group
from fastqt.engines import ENGINES
from fastqt.guide import MARGIN_STRATEGIES
from fastqt.losses import curl, gloss, max_margin, mixcse, ranking_options
from fastqt.nn.gloss import DECODERS
from fastqt.problem import DIAGONALS, MEMORY_MODES, REDUCTIONS, SIMILARITIES, TARGET_REDUCTIONS
from tests.shared.loss_stub import STUB, stub

FILES = (options, gloss, fastqt.nn.gloss)  # that list values
ROOT = Path(__file__).parent.parent
HERE = Path(__file__).parent / "typing"
REPORTED = re.compile(r"^.*?(\w+)\.py:(\d+): error: .*\[([a-z-]+)\]$", re.MULTILINE)


@pytest.mark.slow
def test_mypy_refuses_typical_mistakes_and_nothing_else():
    wanted = {
        (number, reason)
        for number, line in enumerate((HERE / "mistakes.py").read_text().splitlines(), 1)
        for reason in re.findall(r"# E: ([a-z-]+)$", line)
    }
    assert len(wanted) >= 20
    files = [str(HERE / name) for name in ("mistakes.py", "correct.py")]
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", *files]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode in (0, 1), done.stderr
    found = {(int(number), reason) for file, number, reason in REPORTED.findall(done.stdout)}
    assert not [line for line in done.stdout.splitlines() if "mistakes.py" not in line], done.stdout
    assert found == wanted, done.stdout


def test_the_stub_has_the_options_of_the_loss_modules():
    """Where an option has changed, `make stub` writes it anew."""
    assert STUB.read_text() == stub()


@pytest.mark.parametrize(
    ("alias", "checked"),
    [
        ("Reduction", REDUCTIONS),
        ("TargetReduction", TARGET_REDUCTIONS),
        ("DiagonalMode", DIAGONALS),
        ("MarginDiagonal", max_margin.MARGIN_DIAGONALS),
        ("Similarity", SIMILARITIES),
        ("MemoryMode", MEMORY_MODES),
        ("Backend", tuple(ENGINES)),
        ("Target", TARGETS),
        ("MarginStrategy", MARGIN_STRATEGIES),
        ("BlockNegatives", curl.BLOCK_NEGATIVES),
        ("PositionLoss", gloss.POSITION_LOSSES),
        ("MixForm", mixcse.FORMS),
        ("MixPartner", mixcse.PARTNERS),
        ("MixBlocks", mixcse.BLOCKS),
        ("MaskedCell", mixcse.MASKED_CELLS),
        ("Direction", ranking_options.DIRECTIONS),
        ("PartitionMode", ranking_options.PARTITION_MODES),
        ("HardnessMode", ranking_options.HARDNESS_MODES),
        ("ShardSizes", group.SHARDS),
        ("Edges", group.EDGES),
        ("GroupGradients", group.GRADIENTS),
        ("Exchange", group.EXCHANGES),
        ("Recheck", CHECKS),
        ("DecoderKind", DECODERS),
    ],
)
def test_a_type_and_the_check_at_run_time_have_the_same_values(alias, checked):
    assert get_args(next(vars(file)[alias] for file in FILES if alias in vars(file))) == tuple(checked)


# Arguments that take any text, or none that is an option.
OPEN = {"dtype", "device", "name", "directory", "data", "path", "counts", "texts"}


def test_no_option_of_a_public_function_is_any_text():
    """A type checker would not know its values."""
    for module in (fastqt, fastqt.nn, fastqt.distributed):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                function = value.__init__ if inspect.isclass(value) else value
                for parameter in inspect.signature(function).parameters.values():
                    texts = re.search(r"\bstr\b", str(parameter.annotation))
                    assert not texts or parameter.name in OPEN, f"{name}: {parameter}"


def test_no_class_variable_is_without_a_type():
    """Python 3.10 does not evaluate such an annotation, and then no loss is computed."""
    plain = re.compile(r": ClassVar\s*(=|$)", re.MULTILINE)
    assert [
        path.name for path in Path(fastqt.__file__).parent.rglob("*.py") if plain.search(path.read_text())
    ] == []

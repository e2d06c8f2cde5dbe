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
from fastqt.arguments import NO_BATCH
from fastqt.cached.encoding import CHECKS
from fastqt.compiling import TARGETS
from fastqt.distributed import group
from fastqt.engines import ENGINES
from fastqt.exclusions import MARGIN_STRATEGIES
from fastqt.loss import DECLARED
from fastqt.losses import gloss, ranking
from fastqt.nn.gloss import DECODERS
from fastqt.problem import MEMORY_MODES, REDUCTIONS, TARGET_REDUCTIONS
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
    """Where an option has changed, `make lists` writes it anew."""
    assert STUB.read_text() == stub()


@pytest.mark.parametrize(
    ("alias", "checked"),
    [
        ("Reduction", REDUCTIONS),
        ("TargetReduction", TARGET_REDUCTIONS),
        ("MemoryMode", MEMORY_MODES),
        ("Backend", tuple(ENGINES)),
        ("Target", TARGETS),
        ("MarginStrategy", MARGIN_STRATEGIES),
        ("PositionLoss", gloss.POSITION_LOSSES),
        ("Direction", ranking.DIRECTIONS),
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


# The aliases whose values the losses that take them check, and no list of its own.
OF_LOSSES = {
    *("Reduction", "TargetReduction", "DiagonalMode", "MarginDiagonal", "Similarity", "BlockNegatives"),
    *("MixForm", "MixPartner", "MixBlocks", "MaskedCell", "PartitionMode", "HardnessMode"),
}


def test_losses_check_the_values_of_the_types_that_their_signatures_show():
    found = set()
    for function, declaration in DECLARED.items():
        for name, parameter in inspect.signature(function).parameters.items():
            alias = str(parameter.annotation).removesuffix(" | None")
            if alias not in OF_LOSSES:
                continue
            values, check = get_args(getattr(options, alias)), declaration.others[name].check
            for value in values:
                assert check(name, value, NO_BATCH) == value
            wanted = f"^{name}: want one of {', '.join(map(repr, values))}, got 'other'$"
            with pytest.raises(ValueError, match=wanted):
                check(name, "other", NO_BATCH)
            found.add(alias)
    assert found == OF_LOSSES


# Arguments that take any text, or none that is an option.
OPEN = {"dtype", "device", "name", "directory", "data", "path", "counts", "texts"}


def test_no_option_of_a_public_function_is_any_text():
    """A type checker would not know its values."""
    for module in (fastqt, fastqt.nn, fastqt.optim, fastqt.distributed):
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

"""The options of the command line, which are read before anything slow is imported."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import fastqt
from fastqt import compiling
from fastqt.compiling import Compiled
from fastqt.errors import InputError
from fastqt.machine.warming import LOSSES
from fastqt.sentences.cli import COMMANDS, main
from fastqt.sentences.cli.arguments import build_parser
from fastqt.sentences.options.encoders import ENCODERS
from fastqt.sentences.options.option import options_of
from fastqt.sentences.runs.config import KINDS, TrainConfig


@pytest.mark.parametrize("command", [["config"], ["check"], ["train", "x.txt", "--out", "run"]], ids=" ".join)
def test_without_torch_a_command_says_so_in_a_sentence(command, tmp_path):
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from fastqt.sentences.cli import main\n"
        f"sys.exit(main({command}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    wanted = "needs torch >= 2.11, and there is none: install torch first, then fastqt"
    assert done.stderr == f"fastqt: fastqt {fastqt.__version__} {wanted}\n"


def test_help_version_and_errors_import_no_torch():
    program = (
        "import contextlib, sys\n"
        "from fastqt.sentences.cli import main\n"
        "for words in (['--help'], ['--version'], ['train', '--help'], ['evaluate'], []):\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main(words)\n"
        "    print('heavy:', sorted({'torch', 'numpy', 'tokenizers', 'tqdm'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.count("heavy: []\n") == done.stdout.count("heavy:") == 5


def test_each_command_has_a_function():
    help_of_fastqt = build_parser().format_help()
    assert re.findall(r"^    (\w+)", help_of_fastqt, re.MULTILINE) == [*COMMANDS]


def shown(capsys, *words):
    """The options in the groups of a help text."""
    with pytest.raises(SystemExit, match="0"):
        build_parser().parse_args(words)
    sections = re.split(r"^([a-z ,-]+):$", capsys.readouterr().out, flags=re.MULTILINE)
    groups = {
        title: re.findall(r"^  --([\w-]+)", text, re.MULTILINE)
        for title, text in zip(sections[1::2], sections[2::2], strict=True)
    }
    assert groups.pop("options")[:2] == ["out", "resume"]
    return {title: {name for name in names if not name.startswith("no-")} for title, names in groups.items()}


def test_each_option_of_a_training_stands_in_one_group_of_its_help(capsys):
    groups = shown(capsys, "train", "--help-all")
    names = sorted(name.replace("-", "_") for group in groups.values() for name in group)
    assert names == sorted(options_of(TrainConfig).keys() - {"corpus"})
    assert {"valid", "max-length"} <= groups["data"]
    assert {"learning-rate", "batch-size"} <= groups["optimisation"]


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_the_help_of_a_model_kind_has_its_options_and_defaults_alone(capsys, kind):
    groups = shown(capsys, "train", f"--model={kind.name}", "--help")
    names = {name.replace("-", "_") for group in groups.values() for name in group}
    assert names == options_of(kind.options).keys() - {"corpus"} | {"model"}
    parser = build_parser()
    with pytest.raises(SystemExit, match="0"):
        parser.parse_args(["train", "--model", kind.name, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"a step has all of them (default: {kind.default('batch_size'):,})" in text


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_a_model_kind_refuses_the_options_of_others_by_name(kind):
    for name, each in options_of(TrainConfig).items():
        if kind.has(name) or name == "model":
            continue
        number = 0.5 if each.kind is float else 7
        value = True if each.kind is bool else next((x for x in each.choices if x != each.default), number)
        value = str(value) if each.kind is str else value
        value = (value,) * len(each.default or "x") if each.count != 1 else value
        with pytest.raises(InputError, match=f"^{name}: want it with model .* alone, got"):
            TrainConfig(("x.tsv",), model=kind.name, **{name: value})


def test_defaults_of_a_kind_are_those_of_options_that_vary():
    for kind in KINDS.values():
        of_encoders = (name for defaults in kind.of_encoder.values() for name in defaults)
        assert all(options_of(kind.options)[name].varies for name in (*kind.defaults, *of_encoders))
        assert {*kind.of_encoder, *kind.encoders} <= ENCODERS.keys()


def test_each_setting_that_may_change_can_be_set_back():
    """A resumed run keeps the settings that it is not told to change."""
    changed = {"valid": "v.txt", "dev": "d.tsv", "epochs": 3, "steps": 9, "early_stop": 2, "report_every": 7}
    changed |= {"valid_every": 7, "valid_batches": 7, "checkpoint_every": 7, "timeout": 7, "device": "cpu"}
    changed |= {"keep_checkpoint": True, "log": "wandb"}
    options = options_of(TrainConfig)
    assert changed.keys() == {name for name, each in options.items() if each.resume == "change"}
    fresh = TrainConfig(("c.txt",), encoder="transformer")
    stored = replace(fresh, **changed)
    words = ["train", "--out", "run", "--resume"]
    for name in changed:
        option, default = name.replace("_", "-"), getattr(fresh, name)
        words += [f"--no-{option}"] if default in (None, False) else [f"--{option}", str(default)]
    settings = vars(build_parser().parse_args(words))
    resumed = replace(stored, **{name: settings[name] for name in changed})
    assert resumed == fresh
    resumed.check_resumes(stored)


WRONG = [
    ("train c --out ", "argument --out: want a path, got an empty text"),
    ("embed  c --out x.npy", "argument MODEL: want a path, got an empty text"),
    ("expand m v --out ", "argument --out: want a path, got an empty text"),
    ("train c --out r --seed " + "9" * 30, "want a whole number of at most 64 bits, got 999"),
    ("train c --out r --mix half", "argument --mix: want a number, got 'half'"),
    ("neighbors m c --query a -k 1.5", "argument -k: want a whole number, got '1.5'"),
    ("retrieve m --captions c", "the following arguments are required: --features"),
    ("export m --out r", "the following arguments are required: --format"),
    ("index m c", "the following arguments are required: --out"),
    ("mine m p", "the following arguments are required: --out"),
    (
        "train c --out r --batchsize 4",
        "arguments: --batchsize 4; --batchsize: did you mean --batch-size? (see fastqt train --help)",
    ),
    ("train c --batch_size=4 --out=r", "; --batch_size: did you mean --batch-size? (see fastqt t"),
    ("train c --outt r", "required: --out; --outt: did you mean --out? (see fastqt train --help)"),
    ("evaluate m --data d --xyz", "arguments: --xyz (see fastqt evaluate --help)"),
    ("--versoin", "; --versoin: did you mean --version? (see fastqt --help)"),
]


@pytest.mark.parametrize(("line", "message"), WRONG)
def test_arguments_of_another_kind_are_refused(capsys, line, message):
    with pytest.raises(SystemExit, match="2"):
        build_parser().parse_args(line.split(" "))
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("fastqt: ")
    assert err.count("\n") == 1


@pytest.fixture
def calls(monkeypatch):
    """The calls of `warm_up` by fastqt compile; it does nothing."""
    made = []

    def warm_up(loss, *shapes, **options):
        made.append((loss, shapes, options))
        return Compiled(("a_kernel",), "sm_90", 2.0)

    monkeypatch.setattr(compiling, "warm_up", warm_up)
    return made


def test_a_call_for_each_number_of_rows(calls, capsys):
    words = ["--rows", "512", "100", "--columns", "700", "--width", "64", "--dtype", "float32"]
    words += ["--target", "sm_90", "--workers", "2", "--option", "memory=low", "--option", "scale=3.5"]
    assert main(["compile", "info_nce", *words]) == 0
    wanted = [(fastqt.info_nce_loss, ((rows, 64), (700, 64))) for rows in (512, 100)]
    assert [(loss, shapes) for loss, shapes, _ in calls] == wanted
    options = {"dtype": torch.float32, "target": "sm_90", "workers": 2, "memory": "low", "scale": 3.5}
    assert [given for _, _, given in calls] == [options, options]
    printed = capsys.readouterr().out.splitlines()
    assert printed[1] == "100 rows: 1 kernel for sm_90 in 2.0 s: a_kernel"


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_takes_what_it_is_given(calls, name):
    assert main(["compile", name, "--rows", "4", "--width", "3"]) == 0
    ((loss, shapes, options),) = calls
    del options["dtype"], options["target"], options["workers"]
    sides = (torch.randn(shape, requires_grad=True) for shape in shapes)
    loss(*sides, **options).backward()
    assert all(x.grad is not None for x in options.values())


def test_the_help_without_a_model_is_that_of_the_default(capsys):
    texts = []
    for words in (["--help"], ["--model", TrainConfig.model, "--help"]):
        with pytest.raises(SystemExit, match="0"):
            build_parser().parse_args(["train", *words])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert f"options of {TrainConfig.model};" in texts[0]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["trian"], "invalid choice: 'trian'; did you mean train? (see"),
        (["--x", "neighbours"], "did you mean neighbors?"),
        (["zzz"], None),
    ],
)
def test_a_command_that_was_meant_is_named(words, hint, capsys):
    with pytest.raises(SystemExit):
        main(words)
    said = capsys.readouterr().err
    assert hint in said if hint else "mean" not in said


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["train", "--help-all"]], ids=" ".join)
def test_no_line_of_a_help_is_wider_than_a_terminal(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main(words)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80] == []

"""A shell completes commands, the options of each, those of a model kind, and their values."""

import os
import shutil
import subprocess
import sys

import pytest

from fastqt.sentences.cli import main
from fastqt.sentences.cli.table import COMMANDS
from fastqt.sentences.options.option import options_of
from fastqt.sentences.runs.config import KINDS, TrainConfig

FLAGS = {name: each.flag for name, each in options_of(TrainConfig).items() if name != "corpus"}
# Each shell is told the words of a command line, and prints what it would offer for the last one.
ASK = {
    "bash": 'complete -p fastqt >&2; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _fastqt "$1"; '
    'printf "%s\\n" "${COMPREPLY[@]}"',
    "zsh": '_describe() { print -rl -- "${(@P)2}" }; _files() { print files }; words=("$@"); CURRENT=$#; '
    "_fastqt",
    "fish": 'complete -C "$argv"',
}


@pytest.fixture
def completed(capsys):
    """What the script of a shell is told that a word may be, without the remarks."""

    def answers(*words):
        capsys.readouterr()
        assert main(["--shell-words", *words]) == 0
        return {line.partition("\t")[0] for line in capsys.readouterr().out.splitlines()}

    return answers


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """A shell with the script loaded, which finds a command `fastqt` of this environment."""
    command = tmp_path / "fastqt"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fastqt "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))

    def answers(name, *words):
        if (path := shutil.which(name)) is None:
            pytest.skip(f"{name} is not installed")
        script = subprocess.run([command, "--completion", name], capture_output=True, text=True, check=True)
        plain = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[name]
        text = f"{script.stdout}\n{ASK[name]}"
        ask = [path, *plain, "-c", text, *([name] if name != "fish" else []), *words]
        done = subprocess.run(ask, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    return answers


def test_commands_options_and_values_are_completed(completed):
    assert completed("") == set(COMMANDS)
    assert completed("tra") == {"train"}
    assert completed("train", "-") >= {"--model", "--encoder", "--out", "--resume", "-h"}
    assert completed("train", "--model", "") == set(KINDS)
    assert completed("train", "corpus.txt", "--model", "s") == {"skip-thoughts", "simcse"}
    assert completed("mine", "--samp") == {"--sampling"}
    assert completed("--comp") == {"--completion"}
    assert completed("--completion", "") == {"bash", "zsh", "fish"}


def test_the_value_after_an_equals_sign_is_completed(completed):
    assert completed("train", "--model=sim") == {"--model=simcse"}  # zsh and fish
    assert completed("train", "--model", "=", "sim") == {"simcse"}  # bash
    assert completed("train", "--model", "=") == set(KINDS)


def test_nothing_is_offered_where_a_file_or_a_number_belongs(completed):
    assert completed("embed", "run", "file") == set()
    assert completed("train", "--out", "") == set()
    assert completed("train", "--steps", "") == set()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_options_of_a_model_kind_are_completed(completed, kind):
    theirs = {FLAGS[name] for name in FLAGS if kind.has(name) or name == "model"}
    assert completed("train", "--model", kind.name, "--") & set(FLAGS.values()) == theirs
    assert completed("train", f"--model={kind.name}", "--") & set(FLAGS.values()) == theirs


def test_an_unfinished_or_unknown_kind_leaves_the_options_of_all(completed):
    for words in (["--model", "simc"], ["--model", "--resume"]):
        assert set(FLAGS.values()) <= completed("train", *words, "--")


@pytest.mark.parametrize("name", ASK)
def test_a_shell_completes_what_the_command_tells_it(shell, name):
    remark = {"bash": "", "zsh": ":", "fish": "\t"}[name]
    (line,) = shell(name, *typed(name, "fastqt", "tra"))
    assert line.startswith(f"train{remark}")
    lines = shell(name, *typed(name, "fastqt", "train", "--model", "gloss-bow", "--lat"))
    assert [line.partition(remark or " ")[0] for line in lines] == ["--latents"]
    choices = shell(name, *typed(name, "fastqt", "train", "--model", "s"))
    assert sorted(choices) == ["simcse", "skip-thoughts"]


def typed(name, *words):
    return [" ".join(words)] if name == "fish" else words

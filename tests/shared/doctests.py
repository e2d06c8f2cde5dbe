"""Runs the examples in the docstrings of public names."""

import doctest
import inspect
import warnings
from types import ModuleType

import torch


def own(module: ModuleType) -> list[str]:
    """The public functions and classes of a module that fastqt defines.

    Classes of integrations that take the place of a library's say that they are of its module.
    """
    anyone = module.__name__.startswith("fastqt.integrations.")
    found = []
    for name in module.__all__:
        value = getattr(module, name)
        defined = getattr(value, "__module__", "") or ""
        if (inspect.isclass(value) or inspect.isfunction(value)) and (anyone or defined.startswith("fastqt")):
            found.append(name)
    return found


def examples_of(module: ModuleType, name: str) -> list[doctest.DocTest]:
    """The examples in the docstring of a public name; a loss module has its function's as an attribute."""
    value = getattr(module, name)
    where = vars(inspect.getmodule(value) or module).get("__file__")
    found = doctest.DocTestFinder(recurse=False).find(
        value, f"{module.__name__}.{name}", module=False, globs={}
    )
    for test in found:
        test.filename = where
    return [test for test in found if test.examples]


def run_examples(module: ModuleType, name: str) -> str:
    """Runs them; returns what differs from what the docstring shows."""
    said: list[str] = []
    for test in examples_of(module, name):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            # A reader who pastes the example may see these once; they are torch's and the libraries'.
            warnings.simplefilter("ignore")
            doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    return "".join(said)

"""The version of the package, which setuptools and the files that a training writes read from here."""

__version__ = "0.1.0"

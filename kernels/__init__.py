"""Triton kernels, one file a family, each with its launcher.

Installed as `fastqt.kernels`. Imported from the repository's root as `kernels` it would stand
before a package of that name from elsewhere, so that is refused.
"""

if __name__ == "kernels":
    raise ImportError("import fastqt.kernels: this folder is not a package of its own")

"""The package of Triton kernels, whose modules lie in the folder kernels/ at the root of a checkout.

That folder has no __init__.py, because transformers looks for another package named `kernels`, and from the
root of a checkout it would import this one. It passes over a folder that is only a namespace.

The finder of an editable install does not find a namespace inside a regular package. So this module stands
for the package, and its __path__ says where the kernels are: in the folder beside this file where a wheel has
put them, else at the root of the checkout.
"""

from pathlib import Path

_INSTALLED = Path(__file__).with_suffix("")
__path__ = [str(_INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[1] / "kernels")]

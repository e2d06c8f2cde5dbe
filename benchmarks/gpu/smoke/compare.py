"""How the smoke steps compare results with exact values."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from benchmarks.gpu.sections import Verdict


def relative_error(result: Tensor, exact: Tensor) -> float:
    """In the L2 norm, in float64; NaN or inf where `result` has any."""
    wanted = exact.double()
    return float((result.double() - wanted).norm() / wanted.norm())


def near(results: Mapping[str, tuple[Tensor, Tensor, float]]) -> Verdict:
    """Whether each result is as near to its exact values as its bound says; NaN never is.

    Args:
        results: what was found, the exact values and the largest relative error, by name.
    """
    errors = {name: relative_error(result, exact) for name, (result, exact, _) in results.items()}
    wrong = [name for name in results if not errors[name] <= results[name][2]]
    figures = ", ".join(f"{name} {errors[name]:.1e} (at most {results[name][2]:.1e})" for name in results)
    return Verdict(not wrong, f"wrong: {', '.join(wrong)}; {figures}" if wrong else figures)

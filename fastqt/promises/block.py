"""The block in which products of matrices become promises."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastqt.promises import cells as cells
from fastqt.promises import closed as closed
from fastqt.promises import directions
from fastqt.promises import ends as ends
from fastqt.promises import rows as rows
from fastqt.promises import selections as selections
from fastqt.promises.notes import NOTED, note, sources_of, unturned, without_factor
from fastqt.promises.promise import Promise, Watch, called, changes_in_place, promised
from fastqt.promises.report import Report
from fastqt.promises.scores import Product, Scores, equal
from fastqt.promises.state import State, parts
from fastqt.torch_modes import is_transformed

P = ParamSpec("P")
T = TypeVar("T")

LEAST_CELLS = 2**16  # of a score matrix, below which the cells are faster
_MATRICES = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}
_OF_ROWS = {torch.inner, Tensor.inner, F.linear}  # products with the rows of the second


class fused:  # noqa: N801  # used as a function is: `with fastqt.fused():`, `@fastqt.fused()`
    """Runs a loss that is written in plain PyTorch without its score matrix.

    Inside of the block a product of two matrices of embeddings, `queries @ candidates.T`, is a promise.
    Functions of scores that a loss of fastqt knows, such as a temperature, a bias, masks, a softmax with its
    cross-entropy, a logsumexp and the cells of the pairs, are taken together and computed by that loss,
    without the matrix, and so are their gradients. Any other function gets the cells of the program itself,
    computed then, so that a program may be no faster, but has the same results. Its code does not change.

    Args:
        strict: raise RuntimeError where cells of a score matrix would be computed.
        least_cells: the size of a product from which it is a promise.

    Returns:
        A context manager, which gives a `Report`, and a decorator of functions.

    Raises:
        RuntimeError: with `strict`, cells that are wanted; embeddings that are changed in place, outside of
            the block, between product and use.

    Functions that torch.compile has compiled may be called in the block. A graph breaks at a block that is
    inside of such a function.

    Example:
        >>> import torch, fastqt
        >>> import torch.nn.functional as F
        >>> def my_loss(queries, candidates):
        ...     scores = queries @ candidates.T / 0.05
        ...     return F.cross_entropy(scores, torch.arange(len(queries)))
        >>> queries, candidates = F.normalize(torch.randn(2, 512, 16), dim=2)
        >>> with fastqt.fused() as report:
        ...     loss = my_loss(queries, candidates)
        >>> torch.testing.assert_close(loss, my_loss(queries, candidates))
        >>> report.fused, report.computed
        (1, 0)
    """

    def __init__(self, *, strict: bool = False, least_cells: int = LEAST_CELLS) -> None:
        self.strict, self.least_cells = strict, least_cells
        self._stacks: list[contextlib.ExitStack] = []

    def __enter__(self) -> Report:
        mode = _Mode(strict=self.strict, least_cells=self.least_cells)
        self._stacks.append(contextlib.ExitStack())
        self._stacks[-1].push(mode.ended)
        self._stacks[-1].enter_context(mode)
        return mode.report

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stacks.pop().__exit__(kind, error, trace)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            with type(self)(strict=self.strict, least_cells=self.least_cells):
                return function(*args, **kwargs)

        return wrapped


class _Mode(TorchFunctionMode):
    """What sees the functions that a program calls."""

    def __init__(self, *, strict: bool, least_cells: int) -> None:
        super().__init__()
        self.report = Report()
        self.watch, self.least_cells = Watch(self.report, strict=strict), least_cells

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._before_call(func, args, kwargs)
        promises = [x for x in parts((args, tuple(kwargs.values()))) if type(x) is Promise]
        if promises:
            return self._of_promises(func, args, kwargs, promises)
        sides = _sides(func, args, kwargs)
        if sides is not None and self._takes(*sides):
            return self._promise(func, args, kwargs, *sides)
        answer = func(*args, **kwargs)
        if func in NOTED:
            note(func, args, kwargs, answer)
        return answer

    def _of_promises(
        self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], promises: list[Promise]
    ) -> Any:
        waiting = [x for x in promises if directions.waits(x)]
        if waiting and not directions.is_seen_from_outside(func):
            answer = directions.combined(func, args, kwargs)
            if answer is not None:
                self.watch.live.add(answer.box)
                return answer
            directions.become_tensors([x.box for x in waiting])
            self._before_call(func, args, kwargs)
            if not any(type(x) is Promise for x in promises):
                return func(*args, **kwargs)
        answer = called(func, args, kwargs, self.watch)
        if type(answer) is Promise and directions.loss_of(answer.box) is not None:
            return directions.begun(answer, func.__name__, self.watch)
        return answer

    def ended(self, kind: type[BaseException] | None, *error: object) -> None:
        """Computes the losses that have waited in vain."""
        if kind is None:
            waiting = [x for x in self.watch.live if isinstance(x.state.meaning, directions.Waiting)]
            directions.become_tensors(waiting)

    def _before_call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        """Computes what is still promised of tensors whose memory a function is about to change."""
        if not self.watch.live or not changes_in_place(func, kwargs):
            return
        changed = [*parts(args[:1]), *parts(kwargs.get("out"))]
        storages = {
            x.untyped_storage()._cdata for x in changed if type(x) is not Promise and isinstance(x, Tensor)
        }
        if not storages:
            return
        for box in list(self.watch.live):
            if box.state.cells is None and any(
                x.untyped_storage()._cdata in storages for x in box.state.reads()
            ):
                box.state.computed()

    def _takes(self, queries: Tensor, candidates: Tensor) -> bool:
        if len(queries) * len(candidates) < self.least_cells or queries.shape[1] != candidates.shape[1]:
            return False
        if queries.dtype != candidates.dtype or not queries.is_floating_point():
            return False
        if queries.device != candidates.device or torch.is_inference_mode_enabled() or is_transformed():
            return False
        return not any(isinstance(x, torch.nn.Parameter) for x in (*_origins(queries), *_origins(candidates)))

    def _promise(
        self, func: Callable[..., Any], args: Any, kwargs: Any, queries: Tensor, candidates: Tensor
    ) -> Promise:
        device = queries.device.type
        parts_of = [without_factor(x) for x in (queries, candidates)]
        (queries, of_queries), (candidates, of_candidates) = parts_of
        scale = of_queries if equal(of_candidates, 1.0) else of_candidates * of_queries
        product = Product(queries, candidates, scale, made_of=(queries, candidates))
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            product = replace(product, queries=queries.to(dtype), candidates=candidates.to(dtype))
        if not torch.is_grad_enabled():
            product = product.with_tensors(Tensor.detach)
        tensors = [x for x in parts((args, tuple(kwargs.values()))) if isinstance(x, Tensor)]
        state = State(
            func, args, kwargs, Scores((product,)), tuple(y for x in tensors for y in sources_of(x))
        )
        promise = promised(state, product.queries.dtype)
        self.watch.live.add(promise.box)
        return promise


def _origins(x: Tensor) -> tuple[Tensor, ...]:
    """The tensor, and that of which it is a view. Those of a layer are parameters."""
    base = x._base
    return (x,) if base is None else (x, base)


def _sides(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """The rows (N, D) and (M, D) whose products a function gives."""
    if func in (F.cosine_similarity, torch.cosine_similarity):
        return _of_cosines(*args, **kwargs)
    if kwargs:
        return None
    if func in (torch.outer, torch.ger, Tensor.outer, Tensor.ger):
        return _of_vectors(*args)
    if func is torch.einsum:
        return _of_einsum(args)
    if len(args) != 2 or not (func in _MATRICES or func in _OF_ROWS):
        return None
    a, b = args
    if not all(type(x) in (Tensor, torch.nn.Parameter) and x.dim() == 2 for x in args):
        return None
    return (a, b) if func in _OF_ROWS else (a, unturned(b))


def _of_einsum(args: Any) -> tuple[Tensor, Tensor] | None:
    if len(args) == 2 and isinstance(args[1], tuple | list):
        args = (args[0], *args[1])
    if len(args) != 3 or not isinstance(args[0], str) or "->" not in args[0]:
        return None
    inputs, _, output = args[0].replace(" ", "").partition("->")
    first, _, second = inputs.partition(",")
    if len(first) == len(second) == 1 and output == first + second and first != second:
        return _of_vectors(*args[1:])

    if not all(type(x) is Tensor and x.dim() == 2 for x in args[1:]) or len(output) != 2:
        return None
    shared = set(first) & set(second)
    if len(first) != 2 or len(second) != 2 or len(set(first + second)) != 3 or set(output) & shared:
        return None
    if len(shared) != 1 or set(output) != set(first + second) - shared:
        return None
    (summed,) = shared
    rows = {
        (term.replace(summed, "")): x if term[1] == summed else x.T
        for term, x in zip((first, second), args[1:], strict=True)
    }
    return rows[output[0]], rows[output[1]]


def _of_vectors(*vectors: Any) -> tuple[Tensor, Tensor] | None:
    """A vector for each row and one for each column."""
    if len(vectors) != 2 or not all(type(x) is Tensor and x.dim() == 1 for x in vectors):
        return None
    rows, columns = vectors
    return rows[:, None], columns[:, None]


def _of_cosines(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor] | None:
    """Each of (N, 1, D) with each of (1, M, D), as torch takes them by their norms."""
    several = [*args, *(kwargs[name] for name in ("x1", "x2", "dim", "eps")[len(args) :] if name in kwargs)]
    if len(several) != len(args) + len(kwargs) or not 2 <= len(several) <= 4:
        return None
    a, b = several[:2]
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 1)
    eps = kwargs.get("eps", args[3] if len(args) > 3 else 1e-8)
    if not all(type(x) is Tensor and x.dim() == 3 for x in (a, b)) or dim not in (2, -1):
        return None
    if a.dtype != b.dtype or torch.is_autocast_enabled(a.device.type):
        return None
    turned = a.shape[0] == 1 and b.shape[1] == 1
    if not turned and not (a.shape[1] == 1 and b.shape[0] == 1):
        return None
    rows, columns = (b[:, 0], a[0]) if turned else (a[:, 0], b[0])
    return _over_norms(rows, eps), _over_norms(columns, eps)


def _over_norms(x: Tensor, eps: float) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x, dim=1, keepdim=True).clone()
    with torch.no_grad():
        norms.clamp_min_(eps)
    return x / norms

"""Adam for embedding tables: dense Adam of all rows, the same without touching all, or Adam of each row.

A batch uses only about a tenth of the words. A dense gradient of a (50,000, 300) table would nevertheless
allocate, zero, sum, scale and read 60 MB in each step. Here the backward pass returns the gradients of the
used rows only, and `rows` says what becomes of the others.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fastqt.checks import check_option
from fastqt.nn.lag import tell_reads
from fastqt.nn.sparse_gradients import distinct_rows, is_native
from fastqt.optim.replay import WINDOW, replay

Rows = Literal["all", "replayed", "touched"]
Settings = tuple[float, float, float]  # the decay rates of both moments, and eps
# What the state of a table has whose rows are behind: the step up to which each row is right, and lr and the
# factor of the decay of each step since the last multiple of WINDOW.
OF_LAG = ("last", "rates")


class Adam(torch.optim.Adam):
    """Fused `torch.optim.Adam` that also accepts sparse gradients of tables.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay: as in
            `torch.optim.Adam`. A table with sparse gradients takes no amsgrad.
        rows: what a step does to the rows of a table that have no gradient. A group of parameters may have
            its own.

            "all": they move by their momentum, as in dense Adam. Each step reads and writes the table.

            "replayed": the same, and equal to it but for rounding, for the price of the rows in the batch:
            another row is moved when it is read next, by all that it has missed. The modules of fastqt see to
            it in their forward pass, in `eval()`, `state_dict()` and `load_state_dict()`, and so does an
            optimiser that is deleted. Before you read the weights of a table in another way, call `catch_up`.
            It holds for float32 and float64 tables on a CPU that modules of fastqt read, with the extension,
            and without a decay that is not decoupled; other tables are treated as with "all".

            "touched": they stay as they are. Each row counts its own steps, and is optimised as if it were a
            parameter of its own that has no gradient in the other steps. This is not dense Adam, whose rows
            go on by their momentum, and not `torch.optim.SparseAdam` either, whose bias correction counts the
            steps of the whole table.

    `state_dict()` has the form of `torch.optim.Adam`'s, all rows up to date.

    Raises:
        ValueError: an option out of range.
        RuntimeError: in `step`, amsgrad with a sparse gradient.

    Example:
        >>> import torch, fastqt
        >>> embedding = fastqt.nn.StaticEmbedding(100, 4, sparse=True)
        >>> optimizer = fastqt.optim.Adam(embedding.parameters(), lr=0.01, rows="replayed")
        >>> embedding(torch.tensor([5, 7, 7]), torch.tensor([0])).sum().backward()
        >>> optimizer.step()

    Source: Kingma and Ba, "Adam: A method for stochastic optimization" (arXiv:1412.6980).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        rows: Rows = "all",
    ) -> None:
        self._set_up(rows)
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            decoupled_weight_decay=decoupled_weight_decay,
            fused=True,
        )
        self.defaults["rows"] = rows
        # A GradScaler is then to leave out a whole step, not only torch's part of it.
        self._step_supports_amp_scaling = False

    def _set_up(self, rows: Rows) -> None:
        self._rows = rows
        self._dense_gradients: dict[
            Tensor, Tensor
        ] = {}  # of tables all of whose rows move; zeros but in a step
        self._read_by_modules: set[Tensor] = set()  # the tables that modules of fastqt read
        self._settings: dict[Tensor, Settings] = {}  # of the last step of a table whose rows are behind
        self._ignores_reads = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch gives it no types
        if "_rows" not in self.__dict__:  # a copy, or one that was unpickled
            self._set_up(self.defaults["rows"])
            self._step_supports_amp_scaling = False
        for group in self.param_groups:
            self._own(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._own(self.param_groups[-1])

    def _own(self, group: dict[str, Any]) -> None:
        check_option("rows", group.setdefault("rows", self._rows), get_args(Rows))
        for parameter in group["params"] if group["rows"] == "replayed" else ():
            tell_reads(parameter, self._read)

    def __del__(self) -> None:
        """Leaves the tables as dense Adam would: a training often returns the model alone."""
        if not sys.is_finalizing():
            for table in getattr(self, "state", ()):
                self._replay(table)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes a step, and returns what the closure, which computes gradients anew, has returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        tables = [
            (group, table, table.grad)
            for group in self.param_groups
            for table in group["params"]
            if table.grad is not None and table.grad.is_sparse
        ]
        for group, table, gradient in tables:
            table.grad = self._dense_gradient(group, table, *distinct_rows(gradient))
        torch_step: Any = torch.optim.Adam.step
        # torch wraps it for hooks, which the step of this class calls already.
        torch_step = torch_step.__wrapped__ if hasattr(torch_step, "hooked") else torch_step
        torch_step(self)
        for _, table, gradient in tables:
            if table.grad is not None:
                table.grad.index_fill_(0, gradient._indices()[0], 0)
            table.grad = gradient
        return loss

    def _dense_gradient(
        self,
        group: dict[str, Any],
        table: Tensor,  # (V, D)
        rows: Tensor,  # (R,) int64, distinct, ascending
        values: Tensor,  # (R, D)
    ) -> Tensor | None:
        """The table's gradient (V, D) for torch's step; None if the step is taken here."""
        if group["amsgrad"]:
            raise RuntimeError("amsgrad: want False for parameters with sparse gradients")
        if group["rows"] == "touched":
            self._step_of_touched(group, table, rows, values)
            return None
        if self._may_lag(group, table):
            self._step_behind(group, table, rows, values)
            return None

        self._end_lag(table)
        if table not in self._dense_gradients:
            self._dense_gradients[table] = torch.zeros_like(table)
        return self._dense_gradients[table].index_copy_(0, rows, values)

    def _step_of_touched(self, group: dict[str, Any], table: Tensor, rows: Tensor, values: Tensor) -> None:
        state = self.state[table]
        if not state:
            state["step"] = torch.zeros(len(table), device=table.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(table), torch.zeros_like(table)
        count = state["step"].index_select(0, rows) + 1
        state["step"].index_copy_(0, rows, count)
        if _is_native(table):
            _native_step(group, table, state, rows, values, count.long())
        else:
            _step_in_torch(group, table, state, rows, values, count)

    def _may_lag(self, group: dict[str, Any], table: Tensor) -> bool:
        decays_gradients = group["weight_decay"] and not group["decoupled_weight_decay"]
        is_read = table in self._read_by_modules or "last" in self.state[table]
        return group["rows"] == "replayed" and is_read and _is_native(table) and not decays_gradients

    def _step_behind(self, group: dict[str, Any], table: Tensor, rows: Tensor, values: Tensor) -> None:
        """Moves the rows with a gradient; the others are from now on a step further behind."""
        state, settings = self.state[table], _settings(group)
        if not state:
            state["step"] = torch.zeros((), device="cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(table), torch.zeros_like(table)
        if "last" not in state:
            state["last"] = torch.full((len(table),), int(state["step"]), device="cpu")
            state["rates"] = torch.zeros(WINDOW, 2, dtype=torch.float64, device="cpu")
        if self._settings.setdefault(table, settings) != settings:
            self._replay(table)  # the steps that are missed were taken with others
            self._settings[table] = settings

        self._replay(table, rows)  # as their forward pass has done, where it was a module's of fastqt
        state["step"] += 1
        step, lr = int(state["step"]), float(group["lr"])
        rates = [lr, 1 - lr * group["weight_decay"]]
        state["rates"][(step - 1) % WINDOW] = torch.tensor(rates, dtype=torch.float64, device="cpu")
        _native_step(group, table, state, rows, values, torch.full_like(rows, step))
        state["last"].index_fill_(0, rows, step)
        if step % WINDOW == 0:
            self._replay(table)  # so that no row misses more steps than `rates` has

    @torch.no_grad()
    def _replay(self, table: Tensor, rows: Tensor | None = None) -> None:
        """Moves rows, or all, by what they have missed."""
        state = self.state.get(table, {})
        if "last" in state:
            replay(table, state, rows, self._settings_of(table))

    def _settings_of(self, table: Tensor) -> Settings:
        if table not in self._settings:  # of a training that is resumed
            group = next(x for x in self.param_groups if any(y is table for y in x["params"]))
            self._settings[table] = _settings(group)
        return self._settings[table]

    def _end_lag(self, table: Tensor) -> None:
        self._replay(table)
        for key in OF_LAG:
            self.state[table].pop(key, None)

    def _read(self, table: Tensor, ids: Tensor | None) -> None:
        """What modules call before they read a table."""
        if self._ignores_reads:
            return
        if ids is not None:
            self._read_by_modules.add(table)
        self._replay(table, None if ids is None else ids.reshape(-1))

    def catch_up(self) -> None:
        """Brings all rows of all tables up to date, in place."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._replay(parameter)

    @contextlib.contextmanager
    def ignoring_reads(self) -> Iterator[None]:
        """A context in which rows that are read stay behind: for who copies a training as it is.

        `torch.optim.Optimizer.state` has then all that is needed to go on with the same bits.
        """
        before, self._ignores_reads = self._ignores_reads, True
        try:
            yield
        finally:
            self._ignores_reads = before

    @contextlib.contextmanager
    def up_to_date(self) -> Iterator[None]:
        """A context in which all rows are up to date, and after which they are what they were before.

        Evaluations in it change no bit of a training. It takes the memory of the tables once more.
        """
        behind = [table for table, state in self.state.items() if "last" in state]
        values = [table.data for table in behind]
        for table in behind:
            current = table.detach().clone()
            replay(current, self.state[table], None, self._settings_of(table), moments=False)
            table.data = current
        try:
            with self.ignoring_reads():
                yield
        finally:
            for table, before in zip(behind, values, strict=True):
                table.data = before

    def state_dict(self) -> dict[str, Any]:
        """The state in the form of `torch.optim.Adam`, after all rows were brought up to date."""
        self.catch_up()
        packed = super().state_dict()
        packed["state"] = {
            index: {key: value for key, value in state.items() if key not in OF_LAG}
            for index, state in packed["state"].items()
        }
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this class or of `torch.optim.Adam`, whose groups have no `rows`."""
        self.catch_up()
        self._settings.clear()
        groups = zip(self.param_groups, state_dict["param_groups"], strict=False)
        named = [{"rows": group["rows"], **loaded} for group, loaded in groups]
        if len(named) == len(state_dict["param_groups"]):
            state_dict = {**state_dict, "param_groups": named}
        super().load_state_dict(state_dict)


class AdamW(Adam):
    """`Adam` with decoupled weight decay, as `torch.optim.AdamW`.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as in `torch.optim.AdamW`.
        rows: as in `Adam`. With "touched" a row decays in the steps in which it has a gradient.

    Raises:
        ValueError, RuntimeError: as in `Adam`.

    Example:
        >>> import torch, fastqt
        >>> embedding = fastqt.nn.StaticEmbedding(100, 4, sparse=True)
        >>> optimizer = fastqt.optim.AdamW(embedding.parameters(), lr=0.01, rows="touched")

    Source: Loshchilov and Hutter, "Decoupled weight decay regularization" (arXiv:1711.05101).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        rows: Rows = "all",
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            decoupled_weight_decay=True,
            rows=rows,
        )


def _settings(group: dict[str, Any]) -> Settings:
    return (*group["betas"], group["eps"])


def _is_native(table: Tensor) -> bool:
    is_float = table.dtype in (torch.float32, torch.float64)
    return is_native(table) and is_float and table.dim() == 2 and table.is_contiguous() and table.numel() > 0


def _native_step(
    group: dict[str, Any],
    table: Tensor,
    state: dict[str, Tensor],
    rows: Tensor,
    values: Tensor,
    steps: Tensor,  # (R,) int64, the number of the step that each row takes
) -> None:
    torch.ops.fastqt.adam_rows_(
        table.detach(),
        state["exp_avg"],
        state["exp_avg_sq"],
        rows.contiguous(),
        values,
        steps,
        float(group["lr"]),
        *_settings(group),
        group["weight_decay"],
        group["decoupled_weight_decay"],
        group["maximize"],
    )


def _step_in_torch(
    group: dict[str, Any],
    table: Tensor,
    state: dict[str, Tensor],
    rows: Tensor,
    values: Tensor,
    steps: Tensor,  # (R,) float32
) -> None:
    """The same by operations of torch: the rows are distinct, and each is gathered, changed, written back."""
    lr, (beta1, beta2, eps), decay = float(group["lr"]), _settings(group), group["weight_decay"]
    moved = table.index_select(0, rows)
    values = -values if group["maximize"] else values
    if decay and not group["decoupled_weight_decay"]:
        values = values.add(moved, alpha=decay)

    mean = state["exp_avg"].index_select(0, rows).lerp_(values, 1 - beta1)
    square = state["exp_avg_sq"].index_select(0, rows).mul_(beta2)
    square.addcmul_(values, values, value=1 - beta2)
    state["exp_avg"].index_copy_(0, rows, mean)
    state["exp_avg_sq"].index_copy_(0, rows, square)

    corrections = (1 - beta ** steps.double()[:, None] for beta in (beta1, beta2))
    mean_correction, square_correction = (correction.to(table.dtype) for correction in corrections)
    if decay and group["decoupled_weight_decay"]:
        moved.mul_(1 - lr * decay)
    root = square.div_(square_correction).sqrt_().add_(eps)
    table.index_copy_(0, rows, moved.addcdiv_(mean.div_(mean_correction), root, value=-lr))

"""What each rank does in the tests of cached_backward under several processes.

Every function returns how far the gradients are from those of a plain step without DDP or FSDP, averaged
over ranks, and how often gradients were reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import fastqt
from fastqt.cached import cached_embeddings
from tests.shared.hidden_modules import HIDDEN, Trainer
from tests.shared.small_encoders import WIDTH, batch, distance, encoded_in_chunks, encoder, gradients_of

CHUNK = 4
Found = list[tuple[float, list[float]]]


class Centred(nn.Module):
    """An encoder with a buffer, which DDP sends to all ranks at the beginning of a step.

    Autograd has a single tensor for the gradients of its two shifts.
    """

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.layers = encoder(dropout)
        self.register_buffer("mean", torch.full((WIDTH,), 0.5, dtype=torch.float64))
        self.shift, self.other = (nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x - self.mean + (self.shift + self.other))


class Reductions:
    """Wraps modules in DDP and counts how many numbers each reduces."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def wrap(self, module: nn.Module, **options: Any) -> DistributedDataParallel:
        index = len(self.numbers)
        self.numbers.append(0)

        def hook(_, bucket):  # DDP wants no annotations that are text
            self.numbers[index] += bucket.buffer().numel()
            total = bucket.buffer().div_(dist.get_world_size())
            return dist.all_reduce(total, async_op=True).get_future().then(lambda done: done.value()[0])

        ddp = DistributedDataParallel(module, **options)
        ddp.register_comm_hook(None, hook)
        return ddp

    def of(self, *modules: nn.Module) -> list[float]:
        """How often all parameters of each module have been reduced since the last call."""
        sizes = [sum(p.numel() for p in module.parameters()) for module in modules]
        found = [numbers / size for numbers, size in zip(self.numbers, sizes, strict=True)]
        self.numbers[:] = [0] * len(self.numbers)
        return found


class ReduceScatters(TorchDispatchMode):
    """Counts them."""

    count = 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        self.count += "reduce_scatter" in operator.name()
        return operator(*arguments, **(options or {}))


def loss(*embeddings: Tensor) -> Tensor:
    """Of the rows of this rank alone; no rows have none."""
    if len(embeddings[0]) == 0:
        return sum((z.sum() for z in embeddings), torch.zeros((), dtype=torch.float64))
    return fastqt.info_nce_loss(embeddings[0], embeddings[-1])


def plain(
    modules: Sequence[nn.Module],
    encoders: Sequence[Callable],
    x: Tensor,
    seed: int,
    of_rank: Callable[..., Tensor] = loss,
) -> list[Tensor]:
    """The gradients of modules after a plain step without DDP, averaged over ranks."""
    for module in modules:
        module.zero_grad()
    torch.manual_seed(seed)
    of_rank(*(encoded_in_chunks(call, x, CHUNK) for call in encoders)).backward()
    gradients = gradients_of(*modules)
    for g in gradients:
        dist.all_reduce(g.div_(dist.get_world_size()))
    for module in modules:
        module.zero_grad()
    return gradients


def rows_here(rows: Sequence[int]) -> Tensor:
    rank = dist.get_rank()
    return batch(rows[rank], seed=rank)


def compared(
    modules: Sequence[nn.Module],
    encoders: Sequence[Callable],
    x: Tensor,
    reductions: Reductions,
    step: Callable[[], Any],
    of_rank: Callable[..., Tensor] = loss,
) -> Found:
    """Three steps: DDP makes other buckets in the second one."""
    found = []
    for seed in range(3):
        wanted = plain(modules, encoders, x, seed, of_rank)
        torch.manual_seed(seed)
        step()
        found.append((distance(gradients_of(*modules), wanted), reductions.of(*modules)))
    return found


def two_views(rows: Sequence[int], form: str, options: dict[str, Any]) -> Found:
    """SimCSE, of which DDP is given in several forms."""
    module, reductions, x = Centred(), Reductions(), rows_here(rows)
    ddp = reductions.wrap(module, **options)
    box = [ddp]

    def step() -> None:
        if form.startswith("module"):
            later = form == "module that is wrapped later"
            model = fastqt.nn.CachedContrastive([module if later else ddp] * 2, loss, chunk_size=CHUNK)
            model.encoders[0] = ddp
            model(x, x).backward()
            return
        given: dict[str, Any] = {"ddp": ddp} if form == "given" else {"check": "always"}
        forms = {"given": lambda t: box[0](t), "function": lambda t: ddp(t), "call": ddp}
        call = HIDDEN[form](ddp) if form in HIDDEN else forms[form]
        fastqt.cached_backward([call] * 2, [x, x], loss, chunk_size=CHUNK, **given)

    return compared([module], [module] * 2, x, reductions, step)


def two_towers(rows: Sequence[int], form: str) -> Found:
    """Each tower has a DDP of its own; an object may hold both, and one rank's loss not use the second."""
    modules, reductions, x = [Centred(), Centred(0.1)], Reductions(), rows_here(rows)
    towers: list[Any] = [reductions.wrap(module) for module in modules]
    given: dict[str, Any] = {}
    if form == "of an object":
        trainer = Trainer(*towers)
        given, towers = {"ddp": towers}, [trainer.encode, trainer.encode_other]

    def some(a: Tensor, b: Tensor) -> Tensor:
        unused = form == "unused on one rank" and not dist.get_rank()
        return loss(a, b.detach() if unused else b)

    def step() -> None:
        fastqt.cached_backward(towers, [x, x], some, chunk_size=CHUNK, **given)

    return compared(modules, modules, x, reductions, step, some)


class TwoTowers(nn.Module):
    """One module, and one DDP, for both towers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Centred(), Centred(0.1)

    def forward(self, first: Tensor | None = None, second: Tensor | None = None) -> Tensor:
        return self.first(first) if second is None else self.second(second)


def two_towers_in_one_module(rows: Sequence[int]) -> Found:
    module, reductions, x = TwoTowers(), Reductions(), rows_here(rows)
    ddp = reductions.wrap(module, find_unused_parameters=True)

    def step() -> None:
        fastqt.cached_backward([ddp] * 2, [{"first": x}, {"second": x}], loss, chunk_size=CHUNK)

    return compared([module], [module.first, module.second], x, reductions, step)


def accumulated(rows: Sequence[int]) -> Found:
    """Two batches, the first within no_sync()."""
    module, reductions, found = Centred(), Reductions(), []
    ddp, x = reductions.wrap(module), rows_here(rows)
    for seed in (0, 2):
        parts = [plain([module], [module] * 2, x, seed + k) for k in range(2)]
        for k in range(2):
            torch.manual_seed(seed + k)
            with nullcontext() if k else ddp.no_sync():
                fastqt.cached_backward([ddp] * 2, [x, x], loss, chunk_size=CHUNK)
        wanted = [a + b for a, b in zip(*parts, strict=True)]
        found.append((distance(gradients_of(module), wanted), reductions.of(module)))
    return found


def raised(rows: Sequence[int]) -> Found:
    """Steps after one in which the encoder raised in the second pass."""
    module, reductions = Centred(), Reductions()
    ddp, x, calls = reductions.wrap(module), rows_here(rows), []

    def failing(t: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        if calls.count(True) == 2:
            raise KeyError("no such word")
        return ddp(t)

    try:
        fastqt.cached_backward(failing, x, lambda z: z.square().sum(), chunk_size=2)
    except KeyError:
        assert ddp.require_backward_grad_sync
    else:
        raise AssertionError("the error of the encoder was lost")
    assert reductions.of(module) == [0]
    step = lambda: fastqt.cached_backward([ddp] * 2, [x, x], loss, chunk_size=CHUNK)  # noqa: E731
    return compared([module], [module] * 2, x, reductions, step)


def refused() -> list[str]:
    """The messages for what cached_backward cannot hold back."""
    first, second = (DistributedDataParallel(encoder()) for _ in range(2))
    both = nn.ModuleList([first, second])
    static = DistributedDataParallel(encoder(), static_graph=True)
    found = []
    for call in (lambda x: both[0](x), static):
        try:
            fastqt.cached_backward(call, batch(), lambda z: z.square().sum())
        except ValueError as error:
            found.append(str(error))
    fastqt.cached_backward(lambda x: both[0](x), batch(), lambda z: z.square().sum(), ddp=first)
    return found


def sharded(rows: Sequence[int], form: str) -> Found:
    """FSDP2, of which the layers are sharded one by one."""
    module, found, x = Centred(), [], rows_here(rows)
    model = Centred()
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    layers = [layer for layer in model.layers if isinstance(layer, nn.Linear)]
    for part in (*layers, model):
        fully_shard(part, mesh=mesh)
    # Ranks run as many chunks as the one with the most, so that dropout would draw in other chunks.
    for part in (*module.modules(), *model.modules()):
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    for seed in range(2):
        wanted = plain([module], [module] * 2, x, seed)
        model.zero_grad()
        with ReduceScatters() as counted:
            if form == "module":
                fastqt.nn.CachedContrastive([model] * 2, loss, chunk_size=CHUNK)(x, x).backward()
            else:
                fastqt.cached_backward([model] * 2, [x, x], loss, chunk_size=CHUNK)
        gradients = [g.full_tensor() for g in (p.grad for p in model.parameters())]
        groups = len(layers) + 1  # and the shifts
        found.append((distance(gradients, wanted), [counted.count / groups]))
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    with ReduceScatters() as counted:
        fastqt.cached_backward([model] * 2, [x, x], loss, chunk_size=CHUNK)
    assert counted.count == 0
    return found


def across_ranks(rows: Sequence[int]) -> Found:
    """A loss over the batches of all ranks."""
    group = fastqt.distributed.Group(shards="uneven")
    module, reductions, found = Centred(0.0), Reductions(), []
    ddp, x = reductions.wrap(module), rows_here(rows)
    whole = torch.cat([batch(n, seed=rank) for rank, n in enumerate(rows)])
    for _ in range(2):
        module.zero_grad()
        fastqt.info_nce_loss(module(whole), module(whole)).backward()
        wanted = gradients_of(module)
        module.zero_grad()
        fastqt.cached_backward(
            [ddp] * 2, [x, x], lambda *z: fastqt.info_nce_loss(*z, group=group), chunk_size=CHUNK
        )
        found.append((distance(gradients_of(module), wanted), reductions.of(module)))
    return found


def ddp_around(rows: Sequence[int], options: dict[str, Any]) -> Found:
    """DDP around encoders and loss, as Lightning has it."""
    module, reductions, x = Centred(), Reductions(), rows_here(rows)
    ddp = reductions.wrap(fastqt.nn.CachedContrastive([module] * 2, loss, chunk_size=CHUNK), **options)
    return compared([module], [module] * 2, x, reductions, lambda: ddp(x, x).backward())


class Inside(nn.Module):
    """What may not be within a forward pass of DDP."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.encoder, self.form = encoder(), form

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "backward":
            return fastqt.cached_backward(self.encoder, x, lambda z: z.square().sum())
        return cached_embeddings(lambda t: self.encoder(t), x)[0]


def refused_inside() -> list[str]:
    found = []
    for form in ("backward", "function"):
        try:
            DistributedDataParallel(Inside(form))(batch())
        except (RuntimeError, ValueError) as error:
            found.append(str(error))
    return found


def sharded_around(rows: Sequence[int]) -> Found:
    """FSDP2 around encoders and loss."""
    module, model, found, x = Centred(0.0), Centred(0.0), [], rows_here(rows)
    whole = fastqt.nn.CachedContrastive([model] * 2, loss, chunk_size=CHUNK)
    fully_shard(whole, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    for seed in range(2):
        wanted = plain([module], [module] * 2, x, seed)
        whole.zero_grad()
        with ReduceScatters() as counted:
            whole(x, x).backward()
        found.append((distance([p.grad.full_tensor() for p in model.parameters()], wanted), [counted.count]))
    return found

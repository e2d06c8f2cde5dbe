"""Random programs of functions of score matrices, in plain PyTorch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

N, D, K = 12, 5, 3
Variables = list[Any]


class Program:
    """A program that a seed determines: it makes products, changes them, and ends in a number.

    Attributes:
        lines: what it does, for a failure's message.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.lines = seed, []

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        shapes = ((N, D), (N, D), (K, D), (), (N,), (N, 1))
        drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        drawn[3] = drawn[3].abs() + 0.5
        return [x.to(dtype) for x in drawn]

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The program's number, of the same random choices in each call."""
        choices = random.Random(self.seed)
        self.lines = []
        a, b, more, temperature, bias, row = inputs
        if choices.random() < 0.5:
            a, b = choose(choices, ROWS, self)(a, b)
        scores: Variables = [choose(choices, PRODUCTS, self)(a, b)]
        for _ in range(choices.randint(0, 7)):
            step = choose(choices, STEPS, self)
            s = choices.choice(scores)
            if isinstance(s, Tensor) and s.shape == (N, N):
                made = step(s, choices, temperature, bias, row)
                scores.append(s if made is None else made)
        if choices.random() < 0.2:
            self.lines.append("beside")
            scores.append(torch.cat([scores[0], a @ more.T], 1))
        total = a.sum() * 0
        if choices.random() < 0.2:
            self.lines.append("both products")
            total = total + _two_products(a, b, temperature, choices)
        for _ in range(choices.randint(1, 3)):
            s, end = choices.choice(scores), choose(choices, ENDS, self)
            total = total + end(s, choices)
        return total


def choose(
    choices: random.Random, among: dict[str, Callable[..., Any]], program: Program
) -> Callable[..., Any]:
    name = choices.choice(sorted(among))
    program.lines.append(name)
    return among[name]


def mask_of(choices: random.Random, shape: Any) -> Tensor:
    generator = torch.Generator().manual_seed(choices.randrange(2**30))
    mask = torch.rand(shape, generator=generator) < 0.2
    # Row i's target is column i.
    return mask & ~torch.eye(*shape, dtype=torch.bool)


def made_mask(choices: random.Random, n: int, dtype: torch.dtype) -> Tensor:
    """A mask (n, n) that a program makes itself, by several functions, as bool or as numbers."""
    labels = torch.arange(n) // choices.choice((1, 2, 4))
    others = torch.randint(3, (n,), generator=torch.Generator().manual_seed(choices.randrange(2**30)))
    made = [
        lambda: torch.eye(n, dtype=torch.bool),
        lambda: labels[:, None] == labels[None, :],
        lambda: torch.eq(labels.view(-1, 1), labels.view(-1, 1).T),
        lambda: others.unsqueeze(1) != labels,
        lambda: others.expand(n, n).eq(others.expand(n, n).t()),
        lambda: torch.eye(n // 2).repeat(2, 2).bool(),
    ]
    mask = choices.choice(made)()
    for _ in range(choices.randint(0, 4)):
        mask = choices.choice(
            (
                lambda m: ~m,
                lambda m: m.T,
                lambda m: m & choices.choice(made)(),
                lambda m: m | choices.choice(made)().t(),
                lambda m: m ^ choices.choice(made)(),
                lambda m: (m.float() - torch.eye(n)) > 0,
                lambda m: (1 - torch.eye(n, dtype=dtype)) * m == 1,
                lambda m: torch.where(m, 2, torch.eye(n)) != 0,
                lambda m: m.fill_diagonal_(choices.random() < 0.5),
                lambda m: m.clone().contiguous().logical_not_(),
                lambda m: torch.scatter(torch.ones_like(m), 1, torch.arange(n).view(-1, 1), 0) & m,
                lambda m: torch.zeros_like(m.float()).scatter_(1, others[:, None], 1.0) > 0,
                lambda m: m.masked_fill(choices.choice(made)(), choices.random() < 0.5),
                lambda m: m.sum(dim=1, keepdim=True) > 2 * m,
                lambda m: _turned_and_changed(m, choices.random() < 0.5),
            )
        )(mask)
    return mask


def _turned_and_changed(mask: Tensor, value: bool) -> Tensor:
    """Through the transposed mask, and the transposed one through the mask."""
    turned = mask.T
    changed, other = (mask, turned) if value else (turned, mask)
    changed.fill_diagonal_(value)
    return mask & other.clone()


def _masked_by_made(s: Tensor, choices: random.Random, *_: Any) -> Tensor | None:
    mask = made_mask(choices, len(s), s.dtype)
    if choices.random() < 0.5:
        mask = mask & ~torch.eye(len(s), dtype=torch.bool)
    value = choices.choice((-math.inf, -1e9, 0.0))
    spelling = choices.choice(("filled", "where", "in place", "set", "times"))
    if spelling == "filled":
        return s.masked_fill(mask, value)
    if spelling == "where":
        return torch.where(mask, value, s) if choices.random() < 0.5 else torch.where(~mask, s, value)
    if spelling == "times":
        return s * mask.to(s.dtype) if choices.random() < 0.5 else (~mask) * s
    if spelling == "in place":
        s.masked_fill_(mask, value)
    else:
        s[mask] = value
    return None


def _without_the_diagonal_set(s: Tensor, choices: random.Random, *_: Any) -> Tensor:
    """As SimCLR's programs take the rows themselves out."""
    return s.masked_fill(torch.eye(len(s), dtype=torch.bool), choices.choice((-math.inf, -1e9, -9e15)))


def _masked_in_place(s: Tensor, choices: random.Random, *_: Any) -> None:
    s.masked_fill_(mask_of(choices, s.shape), -math.inf)


def _set(s: Tensor, choices: random.Random, *_: Any) -> None:
    s[mask_of(choices, s.shape)] = choices.choice((-1e9, -math.inf, 0.0))


def _filled_diagonal(s: Tensor, choices: random.Random, *_: Any) -> None:
    s.fill_diagonal_(choices.choice((0.0, 1.0)))


def _doubled_in_place(s: Tensor, choices: random.Random, *_: Any) -> None:
    s *= choices.choice((2.0, -0.5))


def _divided_in_place(s: Tensor, choices: random.Random, temperature: Tensor, *_: Any) -> None:
    s /= temperature


def _diagonal_in_place(s: Tensor, choices: random.Random, *_: Any) -> None:
    s.diagonal().add_(0.25)


def _row_in_place(s: Tensor, choices: random.Random, *_: Any) -> None:
    s[choices.randrange(N)] = 0.5


def _turned_in_place(s: Tensor, choices: random.Random, *_: Any) -> None:
    s.t().mul_(1.5)


def _below_zero_set(s: Tensor, choices: random.Random, *_: Any) -> None:
    s[s < 0] = 0.25


def _line_set(s: Tensor, choices: random.Random, *_: Any) -> None:
    """Through a view of a row, of a column or of a block."""
    line = choices.choice((s[3], s[:, 2], s[1:5, 2:], s[-1, 4:]))
    line.mul_(0.5)


def _cells_set(s: Tensor, choices: random.Random, *_: Any) -> None:
    s[_index(s)] = choices.choice((-math.inf, 0.5))


def _clamped_in_place(s: Tensor, choices: random.Random, *_: Any) -> None:
    s.clamp_(min=-1.0)


def _distances(s: Tensor, choices: random.Random, *_: Any) -> Tensor:
    """Those of Euclid by the diagonal, which are exactly 0 on it."""
    squares = s.diag()
    distances = squares.unsqueeze(0) - 2.0 * s + squares.unsqueeze(1)
    distances[distances < 0] = 0
    zeros = distances.eq(0).to(s.dtype)
    return (1.0 - zeros) * torch.sqrt(distances + zeros * 1e-16)


def _large_mask(s: Tensor, choices: random.Random, *_: Any) -> Tensor:
    return s - mask_of(choices, s.shape).to(s.dtype) * choices.choice((1e9, 103.0, 0.5))


def _without_gradient(s: Tensor, choices: random.Random, *_: Any) -> Tensor:
    with torch.no_grad():
        return s * 2


def _over_norms(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a / a.norm(dim=-1, keepdim=True), torch.div(b, torch.norm(b, p=2, dim=1, keepdim=True))


def _without_gradient_of_one(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return F.normalize(a, dim=1), F.normalize(b, dim=1) if a.sum() > 0 else b


def _source_changed(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """After its rows are brought to norm 1."""
    constant = 1 * a.detach()
    unit = F.normalize(constant)
    constant.mul_(2).add_(0.5)
    return unit, F.normalize(b)


def _unit_rows_changed(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Through a view, after a product of what they were."""
    unit, other = F.normalize(a), F.normalize(b)
    before = (unit.detach() @ other.detach().T).logsumexp(1, keepdim=True)
    turned = unit.T
    unit.mul_(2)
    turned[1] = 0.25
    return turned.T + before, other


def _asked_for(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """After the first product, and before the next one."""
    unit, other = F.normalize(a), F.normalize(b)
    first = (unit @ other.T).logsumexp(1, keepdim=True)
    return unit * (unit * other).sum(dim=1, keepdim=True) + 0 * first, unit


# What becomes of embeddings before their products.
ROWS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "normalized": lambda a, b: (F.normalize(a, dim=1), F.normalize(b, p=2.0, dim=-1)),
    "over their norms": _over_norms,
    "one normalized": lambda a, b: (F.normalize(a, dim=-1), b),
    "normalized, times numbers": lambda a, b: (2.0 * F.normalize(a, dim=1), F.normalize(b) * b[0, 0].exp()),
    "normalized and detached": lambda a, b: (F.normalize(a).detach(), F.normalize(b.detach())),
    "normalized without gradient": _without_gradient_of_one,
    "source changed": _source_changed,
    "unit rows changed": _unit_rows_changed,
    "asked for": _asked_for,
    "normalized twice": lambda a, b: (F.normalize(F.normalize(a)), F.normalize(a) + 0.01 * F.normalize(b)),
}
PRODUCTS: dict[str, Callable[..., Any]] = {
    "@": lambda a, b: a @ b.T,
    "mm": lambda a, b: torch.mm(a, b.t()),
    "einsum": lambda a, b: torch.einsum("nd,md->nm", a, b),
    "einsum turned": lambda a, b: torch.einsum("nd,md->mn", a, b),
    "linear": lambda a, b: F.linear(a, b),
    "cosines": lambda a, b: F.normalize(a, dim=1) @ F.normalize(b, dim=1).T,
    "itself": lambda a, b: a @ a.T,
    "cosine_similarity": lambda a, b: F.cosine_similarity(a.unsqueeze(1), b.unsqueeze(0), dim=2),
    "over norms": lambda a, b: (a @ b.T) / torch.einsum("i,j->ij", a.norm(dim=1), b.norm(dim=1)),
}
STEPS: dict[str, Callable[..., Any]] = {
    "times a number": lambda s, r, *_: s * r.choice((0.5, 3, -1.5)),
    "number times": lambda s, r, *_: 2.0 * s,
    "by a temperature": lambda s, r, t, *_: s / t,
    "times a scale": lambda s, r, t, *_: t.exp() * s,
    "negated": lambda s, r, *_: -s,
    "plus a bias": lambda s, r, t, bias, row: s + bias,
    "plus a number": lambda s, r, *_: s - 0.75,
    "plus rows": lambda s, r, t, bias, row: s + row,
    "less the maxima": lambda s, r, *_: s - s.max(dim=1, keepdim=True).values.detach(),
    "turned": lambda s, r, *_: s.t(),
    "T": lambda s, r, *_: s.T,
    "transposed": lambda s, r, *_: s.transpose(0, 1),
    "masked": lambda s, r, *_: s.masked_fill(mask_of(r, s.shape), r.choice((-math.inf, -1e9, -1.0))),
    "where": lambda s, r, *_: torch.where(mask_of(r, s.shape), -math.inf, s),
    "where not": lambda s, r, *_: torch.where(
        ~mask_of(r, s.shape), s, torch.tensor(-math.inf, dtype=s.dtype)
    ),
    "masked by made": _masked_by_made,
    "without the diagonal set": _without_the_diagonal_set,
    "masked in place": _masked_in_place,
    "set": _set,
    "diagonal filled": _filled_diagonal,
    "times in place": _doubled_in_place,
    "divided in place": _divided_in_place,
    "diagonal in place": _diagonal_in_place,
    "row in place": _row_in_place,
    "turned in place": _turned_in_place,
    "detached": lambda s, r, *_: s.detach(),
    "cloned": lambda s, r, *_: s.clone(),
    "contiguous": lambda s, r, *_: s.contiguous(),
    "without gradient": _without_gradient,
    "to dense": lambda s, r, *_: s.to_dense(),
    "viewed": lambda s, r, *_: s.contiguous().view(len(s), -1),
    "reshaped": lambda s, r, *_: s.reshape(s.shape),
    "tanh": lambda s, r, *_: s.tanh(),
    "rectified": lambda s, r, *_: (0.2 + s - s.diagonal()[:, None]).relu(),
    "from one": lambda s, r, *_: 1 - s,
    "clamped": lambda s, r, *_: s.clamp(min=-0.5, max=2),
    "softmax of rows": lambda s, r, *_: s.softmax(dim=1),
    "softmax of columns": lambda s, r, *_: F.softmax(s, dim=0),
    "log of softmax": lambda s, r, *_: s.softmax(-1).log(),
    "log_softmax of all": lambda s, r, *_: F.log_softmax(s, dim=1),
    "numbers of rows where a mask is": lambda s, r, t, b, row: (
        s + row * made_mask(r, len(s), s.dtype).to(s.dtype)
    ),
    "above a threshold": lambda s, r, *_: s.masked_fill(s > 0.5 + s.diag()[:, None].detach(), -math.inf),
    "where larger": lambda s, r, t, *_: torch.where(s > t, s, s * 0.5),
    "bounded": lambda s, r, t, *_: torch.maximum(s, t) + torch.min(s, torch.zeros(1, dtype=s.dtype)),
    "with its transpose": lambda s, r, *_: s + s.t(),
    "times its softmax": lambda s, r, *_: s * s.detach().softmax(1),
    "less a large mask": _large_mask,
    "distances": _distances,
    "below zero set": _below_zero_set,
    "cells set": _cells_set,
    "line set": _line_set,
    "clamped in place": _clamped_in_place,
    "diagonal of others": lambda s, r, *_: s.clone().fill_diagonal_(-2.0),
    "rolled": lambda s, r, *_: s[:, torch.arange(len(s)).roll(2)],
    "halves": lambda s, r, *_: torch.cat([s[:, :5], s[:, 5:] * 2], dim=1),
    "below": lambda s, r, *_: torch.cat([s[:4], -s[4:]]),
    "as numbers": lambda s, r, *_: (s > 0).to(s.dtype) + s.float().to(s.dtype).detach() * 0,
    "scores plus scores": lambda s, r, *_: s + s,
}


def _targets(s: Tensor, choices: random.Random) -> Tensor:
    generator = torch.Generator().manual_seed(choices.randrange(2**30))
    rows = torch.arange(len(s))
    targets = rows if choices.random() < 0.6 else torch.randint(s.shape[1], rows.shape, generator=generator)
    return (
        targets.where(torch.rand(rows.shape, generator=generator) < 0.8, -100)
        if choices.random() < 0.3
        else targets
    )


def _weights(s: Tensor, choices: random.Random) -> Tensor:
    generator = torch.Generator().manual_seed(choices.randrange(2**30))
    weights = torch.rand(s.shape, generator=generator, dtype=s.dtype)
    return (
        torch.eye(*s.shape, dtype=s.dtype)
        if choices.random() < 0.5
        else weights / weights.sum(1, keepdim=True)
    )


def _index(s: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(len(s)), torch.arange(len(s)).roll(1)


def _supervised(s: Tensor, choices: random.Random) -> Tensor:
    """The supervised contrastive loss as it is mostly written."""
    weights, others = _weights(s, choices), 1 - torch.eye(*s.shape, dtype=s.dtype)
    s = s - torch.max(s, dim=1, keepdim=True)[0].detach()
    sums = (torch.exp(s) * others).sum(1, keepdim=True)
    return -((weights * (s - torch.log(sums))).sum(1) / weights.sum(1)).mean()


def _published(s: Tensor, choices: random.Random) -> Tensor:
    """The supervised contrastive loss whose masks the program makes, with what may come in between."""
    n = len(s)
    if s.shape[1] != n:
        return s.sum()
    others = 1 - torch.eye(n, dtype=s.dtype)
    if choices.random() < 0.3:
        others = (~made_mask(choices, n, s.dtype) | torch.eye(n, dtype=torch.bool)).to(s.dtype)
    positives = made_mask(choices, n, s.dtype).to(choices.choice((s.dtype, torch.float32)))
    if choices.random() < 0.6:
        positives = positives * others if choices.random() < 0.5 else (positives - torch.eye(n)).relu()
    largest, places = torch.max(s, dim=1, keepdim=True)
    if choices.random() < 0.8:
        largest = largest.detach()
    logits = s - largest
    more = s.new_zeros(())
    if choices.random() < 0.2:
        more = largest.sum() + places.sum() / 7
    exponentials = torch.exp(logits) * others
    sums = exponentials.sum(1, keepdim=True) if choices.random() < 0.7 else exponentials.sum(1)[:, None]
    log_p = logits - torch.log(sums)
    if choices.random() < 0.2:
        log_p = log_p + 0 * s.detach().sigmoid()
    if choices.random() < 0.2:
        more = more + (sums * 0.01).sum() + log_p.diag().mean()
    weighted = positives * log_p if choices.random() < 0.7 else log_p * positives * 0.5
    counts = positives.sum(1)
    if choices.random() < 0.2:
        return more - weighted.sum() / n
    return more - (weighted.sum(1) / torch.where(counts < 1e-6, 1, counts)).mean()


def _made_targets(s: Tensor, choices: random.Random) -> Tensor:
    if s.shape[1] != len(s):
        return s.mean()
    mask = made_mask(choices, len(s), s.dtype)
    targets = (mask.to(s.dtype) + 0.5) / 2 if choices.random() < 0.3 else mask.to(s.dtype)
    end = choices.choice(("cross_entropy", "kl_div", "binary", "signed", "sum", "selected"))
    if end == "cross_entropy":
        return F.cross_entropy(s, targets) / len(s)
    if end == "kl_div":
        return F.kl_div(F.log_softmax(s, dim=1), targets, reduction="batchmean")
    if end == "binary":
        return F.binary_cross_entropy_with_logits(s, targets)
    if end == "signed":
        return -F.logsigmoid((2 * targets - 1) * s).sum() / len(s)
    if end == "selected":
        return s[mask].square().sum() + (s.exp() * mask).sum(1).log1p().mean()
    return (s * targets).sum(dim=1).square().mean() + (s.log_softmax(1) * targets).sum()


def _weighted_scores(s: Tensor, choices: random.Random) -> Tensor:
    """With weights that may change before the sum."""
    weights = _weights(s, choices) - 0.1
    weighted = s * weights
    if choices.random() < 0.5:
        weights.mul_(2)
    return weighted.sum(dim=1).square().mean()


def _signed(s: Tensor, choices: random.Random) -> Tensor:
    """The sigmoid loss, and what has other weights than its labels."""
    labels = 2 * torch.eye(*s.shape, dtype=s.dtype) - 1
    weights = labels if choices.random() < 0.6 else _weights(s, choices) - 0.5
    return -F.logsigmoid(weights * s).sum() / len(s)


def _masked_exponentials(s: Tensor, choices: random.Random) -> Tensor:
    ones = (~mask_of(choices, s.shape)).to(s.dtype)
    sums = ((s * 0.1).exp() * ones).sum(dim=1)
    ones.fill_(1)
    return sums.log().mean()


def _without_diagonal(s: Tensor, choices: random.Random) -> Tensor:
    """SimCLR as it is mostly written: positives first, then all other cells but the diagonal."""
    n = len(s)
    eye = torch.eye(n, s.shape[1], dtype=torch.bool)
    labels = (torch.arange(n)[:, None] + 1) % n == torch.arange(s.shape[1])
    if s.shape[1] != n:
        return s[~eye].sum()
    labels, s = labels[~eye].view(n, -1), s[~eye].view(n, -1)
    positives, negatives = s[labels].view(n, -1), s[~labels].view(n, -1)
    logits = torch.cat([positives, negatives], dim=1)
    return F.cross_entropy(logits / 0.5, torch.zeros(n, dtype=torch.long))


def _off_diagonals(s: Tensor, choices: random.Random) -> Tensor:
    pairs = torch.cat([torch.diag(s, 3), torch.diag(s, -2), s.diagonal(offset=1)])
    return (pairs.square().sum() + s.masked_select(mask_of(choices, s.shape)).exp().mean()) / 10


def _stacked(s: Tensor, choices: random.Random) -> Tensor:
    logits = torch.cat([s, s.detach() * 2, 0.5 * s], dim=0)
    return F.cross_entropy(logits, torch.arange(len(logits)) % s.shape[1], label_smoothing=0.1)


def _ranks(s: Tensor, choices: random.Random) -> Tensor:
    """How many are above the pair's own, and whether the best is it."""
    own = s.diag() if choices.random() < 0.5 else s[_index(s)]
    above = (s > own[:, None]).sum(dim=1).to(s.dtype)
    best = s.max(dim=1, keepdim=True)[0]
    return above.mean() + (s == best).sum() + (s >= s.amax(1, keepdim=True)).sum() + own.sum()


def _nearest(s: Tensor, choices: random.Random) -> Tensor:
    values, columns = s.topk(1, dim=1)
    least = s.min(dim=1)
    return (values - least.values[:, None]).square().sum() + (columns[:, 0] > least.indices).sum()


def _of_columns(s: Tensor, choices: random.Random) -> Tensor:
    sums = s.sum(dim=0) + s.mean(0) + torch.logsumexp(s, 0, keepdim=True)[0]
    return sums.tanh().sum() + s.amax(dim=0).sum() + s.argmax(dim=0).sum() * s.shape[0]


def _pieces(s: Tensor, choices: random.Random) -> Tensor:
    return s[:, 2].sum() + s[3].square().sum() + s[1:7, 2:].exp().mean() + s[..., :3].sum() + s[:2].sum()


def _with_others(s: Tensor, choices: random.Random) -> Tensor:
    """Losses between two matrices, and of one with numbers."""
    target = s.detach().softmax(dim=1)
    log_p = F.log_softmax(s, dim=1)
    loss = F.kl_div(log_p, target, reduction=choices.choice(("batchmean", "sum")))
    return loss + F.mse_loss(s, target) + F.cross_entropy(s, target) - (target * log_p).sum(dim=1).mean()


def _two_products(a: Tensor, b: Tensor, scale: Tensor, choices: random.Random) -> Tensor:
    """Both directions of pairs as CLIP's programs write them, with what may come in between."""
    rows = torch.arange(len(a))
    factor = choices.choice((scale, 2, 0.5))
    first = F.cross_entropy(factor * a @ b.T, rows)
    if choices.random() < 0.2:
        a = a * 1
    if choices.random() < 0.2:
        scale = scale * 1
    second = F.cross_entropy(choices.choice((factor, scale)) * b @ a.T, rows)
    return choices.choice((0.5, 3)) * first + second


def _both_directions(s: Tensor, choices: random.Random) -> Tensor:
    """The cross-entropies of rows and of columns, with any weights, and what may come in between."""
    rows, turned = torch.arange(len(s)), s.t() if s.shape[0] == s.shape[1] else s
    spelling = choices.choice(("cross_entropy", "nll"))

    def loss(s: Tensor) -> Tensor:
        reduction = choices.choice(("mean", "sum"))
        if spelling == "nll":
            return F.nll_loss(F.log_softmax(s, dim=1), rows, reduction=reduction)
        return F.cross_entropy(s, rows, reduction=reduction)

    first = loss(s)
    between = choices.choice(sorted(BETWEEN))
    first = BETWEEN[between](s, first)
    second = loss(turned)
    return choices.choice(
        (
            lambda: (first + second) / 2,
            lambda: 0.3 * first - second * 0.7,
            lambda: sum([first, second]) / 2,
            lambda: torch.stack([first, second]).square().mean(),
            lambda: first * second,
            lambda: second,
            lambda: first + first.detach() * second,
        )
    )()


def _read(s: Tensor, loss: Tensor) -> Tensor:
    first, second = loss.item(), loss.item()
    assert first == second or (math.isnan(first) and math.isnan(second))
    return loss


def _scores_change(s: Tensor, loss: Tensor) -> Tensor:
    s.mul_(1.5)
    return loss


def _loss_changes(s: Tensor, loss: Tensor) -> Tensor:
    half = loss / 2
    loss += 1
    return loss + half


BETWEEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nothing": lambda s, loss: loss,
    "arithmetic": lambda s, loss: 1 - loss / 2 + 0.5 * loss,
    "a square": lambda s, loss: loss.square(),
    "read": _read,
    "scores change": _scores_change,
    "loss changes": _loss_changes,
    "detached": lambda s, loss: loss.detach() * 2,
}
ENDS: dict[str, Callable[..., Any]] = {
    "cross_entropy": lambda s, r: F.cross_entropy(s, _targets(s, r), reduction=r.choice(("mean", "sum"))),
    "cross_entropy of rows": lambda s, r: (
        F.cross_entropy(s, _targets(s, r), reduction="none").square().mean()
    ),
    "probabilities": lambda s, r: F.cross_entropy(s, _weights(s, r)),
    "log_softmax": lambda s, r: -s.log_softmax(dim=1).diag().mean(),
    "log_softmax of cells": lambda s, r: -F.log_softmax(s, 1)[_index(s)].sum(),
    "both directions": _both_directions,
    "both directions of pairs": _both_directions,
    "nll": lambda s, r: F.nll_loss(F.log_softmax(s, dim=-1), _targets(s, r)),
    "kl_div": lambda s, r: F.kl_div(
        F.log_softmax(s, 1), _weights(s, r), reduction=r.choice(("batchmean", "sum"))
    ),
    "weighted": lambda s, r: -(_weights(s, r) * s.log_softmax(1)).sum(1).mean(),
    "weighted sum": lambda s, r: (-s.log_softmax(1) * _weights(s, r)).sum(),
    "logsumexp": lambda s, r: (s.logsumexp(1) - s.diagonal()).mean(),
    "logsumexp of columns": lambda s, r: torch.logsumexp(s, dim=0).mean(),
    "exp": lambda s, r: (s * 0.1).exp().sum(dim=1, keepdim=True).log().mean(),
    "binary": lambda s, r: F.binary_cross_entropy_with_logits(
        s, _weights(s, r), reduction=r.choice(("sum", "mean"))
    ),
    "published": _published,
    "made targets": _made_targets,
    "supervised": _supervised,
    "weighted scores": _weighted_scores,
    "masked exponentials": _masked_exponentials,
    "signed": _signed,
    "maxima": lambda s, r: s.max(dim=1).values.square().sum() + torch.max(s, 1, True)[0].mean(),
    "exponentials of cells": lambda s, r: (s * 0.1).exp().diag().sum() + (s * 0.1).exp()[_index(s)].sum(),
    "like": lambda s, r: (torch.ones_like(s) + s.new_zeros(s.shape[1])).sum() * s[_index(s)].sum(),
    "gathered": lambda s, r: s.gather(1, _index(s)[1][:, None]).sum(),
    "cells": lambda s, r: s[_index(s)].square().sum(),
    "diagonal": lambda s, r: s.diagonal().square().sum() + torch.diag(s).sum(),
    "part": lambda s, r: s[:4].logsumexp(1).sum(),
    "softmax": lambda s, r: s.softmax(1).square().sum(),
    "without the diagonal": _without_diagonal,
    "off diagonals": _off_diagonals,
    "stacked": _stacked,
    "ranks": _ranks,
    "nearest": _nearest,
    "of columns": _of_columns,
    "pieces": _pieces,
    "with others": _with_others,
    "hinge": lambda s, r: F.relu(1 + s - s.diag().view(-1, 1)).mean() + F.softplus(-s).mean(),
    "smoothed": lambda s, r: F.cross_entropy(s, _targets(s, r), label_smoothing=0.1),
    "accuracies": lambda s, r: (s.argmax(1) == torch.arange(len(s))).sum() + (s > 0.3).float().mean(),
    "selected by itself": lambda s, r: s[s > 0.1].square().sum() + (s.sigmoid() * (s > 0)).sum(1).mean(),
    "sum": lambda s, r: s.tanh().sum(),
    "accuracy": lambda s, r: (s.argmax(dim=1) == torch.arange(len(s))).to(s.dtype).mean(),
    "asked": lambda s, r: s.sigmoid().sum() * s.requires_grad + s.shape[1] * s.dim() + (s.grad_fn is None),
}

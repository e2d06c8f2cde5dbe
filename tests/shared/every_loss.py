"""A call of every public loss, and its formula in eager PyTorch, which shares no code with fastqt.

The formulas make all scores at once and run in the dtype of their inputs: in float64 they are the truth, and
in 16 bits what a user would have without fastqt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fastqt

N, D, V, L, K = 16, 12, 12, 3, 4  # rows, width, words, places of a sentence, drawn negatives
Inputs = dict[str, Tensor]


class Loss(NamedTuple):
    """A loss with options, and what it is compared with.

    Attributes:
        function: the public loss.
        inputs: the tensor arguments for a number of rows, float32, random or as at the end of training.
        eager: the formula; a scalar, or a number for each row.
        options: the other arguments of `function`.
        constant: the embeddings that no gradient flows to.
        one_row: the argument that is named where one row is refused; None where it is taken.
        fullgraph: whether torch.compile makes one graph of it, as docs/faq.md says.
    """

    function: Callable[..., Tensor]
    inputs: Callable[[int, torch.Generator, bool], Inputs]
    eager: Callable[..., Tensor]
    options: Mapping[str, Any] = MappingProxyType({})
    constant: tuple[str, ...] = ()
    one_row: str | None = None
    fullgraph: bool = True


def window(n: int) -> Tensor:
    """(n, n) float64, 1 for each neighbour."""
    apart = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    return (apart == 1).double()


def cosines(a: Tensor, b: Tensor) -> Tensor:
    return F.normalize(a, dim=1) @ F.normalize(b, dim=1).T


def own(rows: Tensor) -> Tensor:
    return torch.arange(len(rows))


def binary(scores: Tensor, targets: Tensor) -> Tensor:
    """The binary cross-entropy of all scores of a row."""
    targets = targets.to(scores.dtype)
    return F.binary_cross_entropy_with_logits(scores, targets, reduction="none").sum(1)


# The inputs of the losses.


def pairs(*names: str, targets: Callable[[int], Tensor] = torch.eye) -> Callable[..., Inputs]:
    """Rows of the first name that, once converged, score high with their targets among the second's."""

    def inputs(n: int, generator: torch.Generator, converged: bool) -> Inputs:
        found = {name: torch.randn(n, D, generator=generator) for name in names}
        first, second = names[:2]
        if converged:
            found[first] = 4 * targets(n).float() @ F.normalize(found[second], dim=1)
        return found

    return inputs


def with_numbers(inputs: Callable[..., Inputs], **numbers: float) -> Callable[..., Inputs]:
    return lambda *given: inputs(*given) | {name: torch.tensor(value) for name, value in numbers.items()}


def drawn(n: int, generator: torch.Generator, converged: bool) -> Inputs:
    candidates = torch.randn(n, D, generator=generator)
    queries = 4 * F.normalize(candidates, dim=1) if converged else torch.randn(n, D, generator=generator)
    negatives = torch.randint(max(n, 1), (n, K), generator=generator)
    return {
        "queries": queries,
        "candidates": candidates,
        "positives": torch.arange(n),
        "negatives": negatives,
    }


def words(n: int, generator: torch.Generator, converged: bool) -> Inputs:
    """Sentences of L different words, and a decoder."""
    weight = torch.randn(V, D, generator=generator)
    ids = torch.stack([torch.randperm(V, generator=generator)[:L] for _ in range(n)] or [torch.zeros(L)])
    ids = ids[:n].long()
    latents = torch.randn(n, D, generator=generator)
    if converged:
        latents = 2 * F.normalize(weight, dim=1)[ids].sum(1)
    bias = torch.randn(V, generator=generator)
    return {"latents": latents, "weight": weight, "bias": bias, "token_ids": ids}


def in_bags(*given: Any) -> Inputs:
    found = words(*given)
    n = len(found["latents"])
    return found | {"token_ids": found["token_ids"].flatten(), "offsets": torch.arange(0, L * n, L)}


def at_places(n: int, generator: torch.Generator, converged: bool) -> Inputs:
    found = words(n, generator, converged)
    positions = torch.randn(L, D, generator=generator)
    return found | {"positions": positions, "lengths": L - torch.arange(n) % 2}


def labelled(n: int, generator: torch.Generator, converged: bool) -> Inputs:
    labels = torch.arange(n) // 2
    embeddings = torch.randn(n, D, generator=generator)
    if converged:
        embeddings = torch.randn(n, D, generator=generator)[labels] + 0.1 * embeddings
    return {"embeddings": embeddings, "labels": labels}


def guided(n: int, generator: torch.Generator, converged: bool) -> Inputs:
    found = pairs("anchors", "positives")(n, generator, converged)
    return found | pairs("guide_anchors", "guide_positives")(n, generator, False)


def ranked_pairs(n: int, generator: torch.Generator, converged: bool) -> Inputs:
    """Pairs with labels of which some are equal, and once converged with cosines of 1 and -1."""
    labels = torch.arange(n) * 3 // 2 % 4
    a, b = torch.randn(2, n, D, generator=generator)
    if converged:
        labels = labels // 2
        b = a * (2 * labels[:, None] - 1) + 0.01 * b
    return {"a": a, "b": b, "labels": labels}


def ranked_scores(n: int, generator: torch.Generator, converged: bool) -> Inputs:
    labels = torch.arange(n) * 3 // 2 % 4
    scores = torch.randn(n, generator=generator)
    return {"scores": scores + 20 * labels if converged else scores, "labels": labels}


def few_directions(n: int, generator: torch.Generator, converged: bool) -> Inputs:
    """Rows that are alike, or once converged nearly those of an orthonormal basis and of its negative."""
    noise = torch.randn(n, D, generator=generator)
    basis = torch.eye(D).repeat(2, 1)[torch.arange(n) % (2 * D)] * (1 - 2 * (torch.arange(n)[:, None] % 2))
    return {"embeddings": basis + 0.1 * noise if converged else 0.3 + noise}


def taught(n: int, generator: torch.Generator, converged: bool) -> Inputs:
    """A student of a wider teacher; once converged its scores are nearly the teacher's."""
    teacher, embeddings = torch.randn(2, n, D, generator=generator)
    if converged:
        rotation = torch.linalg.qr(torch.randn(D, D, generator=generator))[0]
        embeddings = teacher @ rotation + 0.05 * embeddings
    return {"embeddings": embeddings, "teacher_embeddings": F.pad(teacher, (0, 3))}


def taught_candidates(n: int, generator: torch.Generator, converged: bool) -> Inputs:
    """Few columns, so that sums over columns are smaller than the scores."""
    both = taught(2 * n, generator, converged)
    sides = {}
    for name, x in both.items():
        narrow = torch.cat([x[:, :2], x[:, 2:3] * (not converged)], 1)
        if converged and name == "embeddings":
            narrow = F.pad(both["teacher_embeddings"][:, :2], (1, 0)) + 0.05 * x[:, :3]
        sides[name], sides[name.replace("embeddings", "candidates")] = narrow[:n], narrow[n:]
    return sides


# The formulas.


def contrastive(queries: Tensor, candidates: Tensor) -> Tensor:
    scores = (queries @ candidates.T).masked_fill(torch.eye(len(queries), dtype=torch.bool), 0)
    T = window(len(queries))
    T = (T / T.sum(1, keepdim=True)).to(scores.dtype)
    return F.kl_div(scores.log_softmax(1), T, reduction="none").sum(1)


def sigmoid(queries: Tensor, candidates: Tensor) -> Tensor:
    return binary(queries @ candidates.T, window(len(queries)))


def info_nce(queries: Tensor, candidates: Tensor, negatives: Tensor | None = None) -> Tensor:
    columns = candidates if negatives is None else torch.cat([candidates, negatives])
    return F.cross_entropy(20 * cosines(queries, columns), own(queries))


def info_nce_with_margin(queries: Tensor, candidates: Tensor, negatives: Tensor) -> Tensor:
    similar, pairs = cosines(queries, torch.cat([candidates, negatives])), own(queries)
    above = similar > similar.gather(1, pairs[:, None]) + MARGIN
    return F.cross_entropy((20 * similar).masked_fill(above, -math.inf), pairs)


def with_rows(n: int, generator: torch.Generator, converged: bool) -> Inputs:
    """Pairs with up to L negatives of each query alone; padding holds numbers, too."""
    found = pairs("queries", "candidates")(n, generator, converged)
    padding = torch.arange(L) >= torch.randint(L + 1, (n, 1), generator=generator)
    padding[-1:] = False
    return found | {"row_negatives": torch.randn(n, L, D, generator=generator), "is_padding": padding}


def of_rows(queries: Tensor, row_negatives: Tensor) -> Tensor:
    """The cosines of queries with their own rows, (N, K)."""
    return torch.einsum("nd,nkd->nk", F.normalize(queries, dim=1), F.normalize(row_negatives, dim=2))


def call_padded(
    queries: Tensor, candidates: Tensor, row_negatives: Tensor, is_padding: Tensor, **options: Any
) -> Tensor:
    padding = fastqt.Padding(is_padding)
    return fastqt.info_nce_loss(queries, candidates, row_negatives=row_negatives, exclude=padding, **options)


def padded(queries: Tensor, candidates: Tensor, row_negatives: Tensor, is_padding: Tensor) -> Tensor:
    alone = of_rows(queries, row_negatives).masked_fill(is_padding, -math.inf)
    return F.cross_entropy(20 * torch.cat([cosines(queries, candidates), alone], 1), own(queries))


def debiased(queries: Tensor, candidates: Tensor, tau_plus: float, scale: float | Tensor = 20.0) -> Tensor:
    scores = scale * cosines(queries, candidates)
    positive, count = scores.diagonal(), len(scores) - 1
    R = scores.masked_fill(torch.eye(len(scores), dtype=torch.bool), -math.inf).exp().sum(1)
    G = (R - tau_plus * count * positive.exp()) / (1 - tau_plus)
    G = torch.maximum(G, count * torch.exp(-torch.as_tensor(scale)).to(G))
    return torch.log1p(G / positive.exp())


def call_qwen(queries: Tensor, candidates: Tensor, row_negatives: Tensor, is_padding: Tensor) -> Tensor:
    texts = fastqt.Same(own(queries) // 3)
    return fastqt.multiple_negatives_ranking_loss(
        queries,
        candidates,
        row_negatives=row_negatives,
        directions=("query_to_doc", "query_to_query", "doc_to_doc"),
        exclude=[fastqt.Margin(MARGIN), texts, fastqt.Padding(is_padding)],
    )


def qwen(queries: Tensor, candidates: Tensor, row_negatives: Tensor, is_padding: Tensor) -> Tensor:
    """Equation 1 of Qwen3-Embedding's report, of which equation 2 has the factors."""
    pair = cosines(queries, candidates).diagonal()[:, None]
    texts, itself = own(queries) // 3, torch.eye(len(queries), dtype=torch.bool)
    same = (texts[:, None] == texts) | itself
    blocks = [(cosines(queries, queries), same), (cosines(candidates, candidates), same)]
    blocks += [(cosines(queries, candidates), same), (of_rows(queries, row_negatives), is_padding)]
    cells = [x.masked_fill(leaves | (x > pair + MARGIN), -math.inf) for x, leaves in blocks]
    return F.cross_entropy(20 * torch.cat([pair, *cells], 1), torch.zeros(len(queries)).long())


def mixcse(z1: Tensor, z2: Tensor) -> Tensor:
    second = F.normalize(z2, dim=1).detach()
    mixtures = F.normalize(0.2 * second + 0.8 * second.roll(-1, 0), dim=1)
    of_mixture = (F.normalize(z1, dim=1) * mixtures).sum(1, keepdim=True)
    return F.cross_entropy(20 * torch.cat([cosines(z1, z2), of_mixture], 1), own(z1))


def mixed(queries: Tensor, candidates: Tensor, partners: Tensor) -> Tensor:
    fixed = candidates.detach()
    mixtures = F.normalize(0.2 * fixed + 0.8 * fixed[partners], dim=1)
    of_mixture = (queries * mixtures).sum(1, keepdim=True)
    return F.cross_entropy(torch.cat([queries @ candidates.T, of_mixture], 1), own(queries))


def with_partners(n: int, generator: torch.Generator, converged: bool) -> Inputs:
    found = pairs("queries", "candidates")(n, generator, converged)
    return found | {"partners": torch.arange(n).roll(3)}


def call_mixed(queries: Tensor, candidates: Tensor, partners: Tensor) -> Tensor:
    negatives = fastqt.Mixed(0.2, partners)
    options: dict[str, Any] = {"diagonal": "keep", "row_negatives": negatives}
    return fastqt.contrastive_loss(queries, candidates, fastqt.Diagonal(), **options)


def mixcse_released(z1: Tensor, z2: Tensor) -> Tensor:
    a, m = (0.2 * z + 0.8 * z.roll(-1, 0) for z in (z1.detach(), z2.detach()))
    after = torch.eye(len(z1)).roll(1, 1).bool()
    second = cosines(z1, m).masked_fill(after.T, 0)
    third = cosines(a, z2).masked_fill(after, 0)
    return F.cross_entropy(20 * torch.cat([cosines(z1, z2), second, third], 1), own(z1))


def captions(n: int) -> Tensor:
    return torch.eye(n) + torch.eye(n).roll(1, 1) * (n > 1)


def call_several_positives(queries: Tensor, candidates: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    options: dict[str, Any] = {"scale": scale, "bias": bias, "normalize": True, "diagonal": "keep"}
    return fastqt.sigmoid_loss(queries, candidates, captions(len(queries)), **options)


def several_positives(queries: Tensor, candidates: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """SigLIP's own form, whose sign is 1 for positives and -1 for others."""
    signs = 2 * captions(len(queries)).to(queries.dtype) - 1
    return -F.logsigmoid(signs * (scale * cosines(queries, candidates) + bias)).sum(1)


def clip(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    scores = scale * cosines(a, b)
    return (F.cross_entropy(scores, own(a)) + F.cross_entropy(scores.T, own(b))) / 2


def max_margin(queries: Tensor, candidates: Tensor) -> Tensor:
    T, scores = window(len(queries)).bool(), queries @ candidates.T
    others = ~T & ~torch.eye(len(queries), dtype=torch.bool)
    hinges = (1 - scores[:, :, None] + scores[:, None]).clamp(min=0)
    return hinges.masked_fill(~(T[:, :, None] & others[:, None]), 0).sum((1, 2))


def curl(queries: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
    return F.softplus(-(queries * (positives - negatives)).sum(1))


def curl_block(queries: Tensor, candidates: Tensor, negatives: str = "shift") -> Tensor:
    T = window(len(queries)).to(queries.dtype)
    others = T.roll(len(queries) // 2, 1)
    if negatives == "complement":
        others = 1 - T - torch.eye(len(queries), dtype=T.dtype)
    means, of_others = (x / x.sum(1, keepdim=True) @ candidates for x in (T, others))
    return curl(queries, means, of_others)


DOCUMENTS = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 3, 4, 4, 4, 4, 4, 4, 4])


def binary_window(queries: Tensor, candidates: Tensor, document_ids: Tensor | None = None) -> Tensor:
    T = window(len(queries))
    if document_ids is not None:
        T = T * (document_ids[:, None] == document_ids)
    known = T.sum(1) > 0
    scores = queries @ (T.to(candidates.dtype) @ candidates).T
    cells = F.binary_cross_entropy_with_logits(scores, torch.eye(len(T)).to(scores), reduction="none")
    return cells.masked_fill(~(known[:, None] & known), 0).sum(1)


def negative_sampling(queries: Tensor, candidates: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
    positive = (queries * candidates[positives]).sum(1)
    others = (candidates[negatives] @ queries[:, :, None]).squeeze(2)
    same = negatives == positives[:, None]
    return F.softplus(-positive) + F.softplus(others).masked_fill(same, 0).sum(1)


def gloss_bow(latents: Tensor, weight: Tensor, bias: Tensor, token_ids: Tensor, offsets: Tensor) -> Tensor:
    named = F.one_hot(token_ids.view(len(offsets), -1), len(weight)).amax(1)
    return binary(latents @ weight.T + bias, named)


def gloss_pos(
    latents: Tensor, positions: Tensor, weight: Tensor, bias: Tensor, token_ids: Tensor, lengths: Tensor
) -> Tensor:
    scores = (latents[:, None] + positions) @ weight.T + bias
    losses = F.cross_entropy(scores.flatten(0, 1), token_ids.flatten(), reduction="none").view(
        token_ids.shape
    )
    return losses.masked_fill(torch.arange(len(positions)) >= lengths[:, None], 0).sum(1)


def supcon(embeddings: Tensor, labels: Tensor) -> Tensor:
    itself = torch.eye(len(labels), dtype=torch.bool)
    same = (labels[:, None] == labels) & ~itself
    logits = (10 * cosines(embeddings, embeddings)).masked_fill(itself, -math.inf).log_softmax(1)
    return -logits.masked_fill(~same, 0).sum(1) / same.sum(1)


def ntxent(embeddings: Tensor, labels: Tensor) -> Tensor:
    scores = 10 * cosines(embeddings, embeddings)
    same = labels[:, None] == labels
    negatives = scores.masked_fill(same, -math.inf).logsumexp(1)
    return F.softplus(negatives[:, None] - scores)[same & ~torch.eye(len(labels), dtype=torch.bool)]


def gist(anchors: Tensor, positives: Tensor, guide_anchors: Tensor, guide_positives: Tensor) -> Tensor:
    eye = torch.eye(len(anchors), dtype=torch.bool)

    def scores(a: Tensor, p: Tensor) -> Tensor:
        return torch.cat([cosines(a, p), cosines(a, a), cosines(p, p)], 1)

    of_guide = scores(guide_anchors, guide_positives)
    leaves = of_guide > of_guide.diagonal()[:, None]
    leaves = leaves & ~F.pad(eye, (0, 2 * len(eye)))
    return F.cross_entropy((20 * scores(anchors, positives)).masked_fill(leaves, -math.inf), own(anchors))


def of_two_views(
    z1: Tensor, z2: Tensor, scale: float | Tensor, loss: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """The mean over both views of a loss of the pair's score (2 N,) and the negatives' (2 N, 2 N - 2)."""
    N, both = len(z1), torch.cat([z1, z2])
    S = scale * cosines(both, both)
    sentences = torch.arange(2 * N) % N
    negatives = S[sentences[:, None] != sentences].view(2 * N, 2 * N - 2)
    return loss(S.diagonal(N).repeat(2), negatives).view(2, N).mean(0)


def dcl(z1: Tensor, z2: Tensor, scale: float | Tensor = 10.0) -> Tensor:
    return of_two_views(z1, z2, scale, lambda positive, negatives: negatives.logsumexp(1) - positive)


def hcl(
    z1: Tensor, z2: Tensor, scale: float | Tensor = 2.0, beta: float = 1.0, tau_plus: float = 0.1
) -> Tensor:
    def loss(positive: Tensor, negatives: Tensor) -> Tensor:
        count = negatives.shape[1]
        weights = count * (beta * negatives).softmax(1)
        G = ((weights * negatives.exp()).sum(1) - tau_plus * count * positive.exp()) / (1 - tau_plus)
        G = torch.maximum(G, count * torch.exp(-torch.as_tensor(scale)).to(G))
        return torch.log1p(G / positive.exp())

    return of_two_views(z1, z2, scale, loss)


def taught_pairs(n: int, generator: torch.Generator, converged: bool) -> Inputs:
    """A student and a teacher, which once converged have nearly the same cosines."""
    student = pairs("queries", "candidates")(n, generator, False)
    teacher = {f"teacher_{name}": x.clone() for name, x in student.items()}
    if converged:
        student = {name: 3 * x + 0.02 * torch.randn(n, D, generator=generator) for name, x in student.items()}
    else:
        teacher = pairs("teacher_queries", "teacher_candidates")(n, generator, False)
    return student | teacher


def distillation(
    queries: Tensor,
    candidates: Tensor,
    teacher_queries: Tensor,
    teacher_candidates: Tensor,
    scale: float | Tensor = 20.0,
) -> Tensor:
    log_P = (scale * cosines(queries, candidates)).log_softmax(1)
    T = (20 * cosines(teacher_queries, teacher_candidates)).softmax(1)
    return F.kl_div(log_P, T, reduction="none").sum(1)


def of_candidates(n: int, generator: torch.Generator, converged: bool) -> Inputs:
    """Scores of up to K candidates of each row, whose first one is there; the others hold numbers, too."""
    scores, teacher_scores = 3 * torch.randn(2, n, K, generator=generator)
    mask = torch.randint(3, (n, K), generator=generator) > 0
    mask[:, 0] = mask[-1:] = True
    if converged:
        scores = teacher_scores + 0.02 * scores
    return {"scores": scores, "teacher_scores": teacher_scores, "mask": mask}


def score_distillation(
    scores: Tensor, teacher_scores: Tensor, mask: Tensor, scale: float | Tensor = 1.0
) -> Tensor:
    log_P, T = (x.masked_fill(~mask, -1e4).log_softmax(1) for x in (scale * scores, 0.7 * teacher_scores))
    return F.kl_div(log_P, T.exp(), reduction="none").sum(1)


def margin_mse(scores: Tensor, teacher_scores: Tensor, mask: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """Of each row's negatives, one row at a time."""
    rows = []
    for S, R, there in zip(scale * scores, teacher_scores, mask, strict=True):
        negatives = there.nonzero()[1:, 0]
        rows.append(F.mse_loss(S[0] - S[negatives], R[0] - R[negatives]) if len(negatives) else 0 * S[0])
    return torch.stack(rows)


def ranking(scores: Tensor, labels: Tensor) -> Tensor:
    differences = (scores[None] - scores[:, None])[labels[:, None] > labels]
    return F.softplus(differences.logsumexp(0), threshold=50)


def cosent(a: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    return ranking(20 * F.cosine_similarity(a, b), labels)


def angle(a: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    (p, q), (r, t) = (F.normalize(x, dim=1).chunk(2, 1) for x in (a, b))
    return ranking(20 * (p * r + q * t + q * r - p * t).sum(1).abs(), labels)


def of_prefixes(name: str) -> Loss:
    """A loss of several prefixes of its embeddings, whose formula is the sum of those of each prefix."""
    loss, weights = EVERY_LOSS[name], {3: 1.0, 7: 0.5, D: 2.0}

    def eager(**inputs: Tensor) -> Tensor:
        def of(dim: int) -> Tensor:
            narrow = {key: x[:, :dim] if x.dim() == 2 else x for key, x in inputs.items()}
            return loss.eager(**narrow)

        return sum((weight * of(dim) for dim, weight in weights.items()), torch.zeros(()))

    prefixes = fastqt.Matryoshka(tuple(weights), tuple(weights.values()))
    return loss._replace(eager=eager, options={**loss.options, "matryoshka": prefixes})


def spread_out(
    embeddings: Tensor, mean_weight: float = 1.0, second_moment_weight: float = 1.0, hinge: bool = True
) -> Tensor:
    n, d = embeddings.shape
    others = cosines(embeddings, embeddings)[~torch.eye(n, dtype=torch.bool)]
    second = others.square().mean()
    second = (second - 1 / d).relu() if hinge else second
    return mean_weight * others.mean().square() + second_moment_weight * second


def flops(embeddings: Tensor) -> Tensor:
    return embeddings.abs().mean(0).square().sum()


def second_moment(embeddings: Tensor) -> Tensor:
    return (embeddings @ embeddings.T)[~torch.eye(len(embeddings), dtype=torch.bool)].square().mean()


def distilled(
    embeddings: Tensor,
    teacher_embeddings: Tensor,
    candidates: Tensor | None = None,
    teacher_candidates: Tensor | None = None,
) -> Tensor:
    student = cosines(embeddings, embeddings if candidates is None else candidates)
    others = teacher_embeddings if teacher_candidates is None else teacher_candidates
    return (student - cosines(teacher_embeddings, others)).square().mean()


def classified(n: int, generator: torch.Generator, converged: bool) -> Inputs:
    """Rows and their classes, whose vectors they nearly are once converged."""
    weight, labels = torch.randn(V, D, generator=generator), torch.arange(n) % V
    embeddings = torch.randn(n, D, generator=generator)
    if converged:
        embeddings = 3 * weight[labels] + 0.1 * embeddings
    return {"embeddings": embeddings, "weight": weight, "labels": labels}


def with_target(
    embeddings: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: float | Tensor,
    change: Callable[[Tensor], Tensor],
) -> Tensor:
    """The cross-entropy of cosines of which the target's is changed."""
    scores = cosines(embeddings, weight)
    is_target = F.one_hot(labels, len(weight)).bool()
    return F.cross_entropy(scale * torch.where(is_target, change(scores), scores), labels, reduction="none")


def cosface(embeddings: Tensor, weight: Tensor, labels: Tensor, scale: float | Tensor = 64.0) -> Tensor:
    return with_target(embeddings, weight, labels, scale, lambda cosine: cosine - 0.35)


def arcface(embeddings: Tensor, weight: Tensor, labels: Tensor, scale: float | Tensor = 64.0) -> Tensor:
    def turned(cosine: Tensor) -> Tensor:
        eps = torch.finfo(cosine.dtype).eps  # at an angle of 0 the arc cosine has no derivative
        angle = cosine.clamp(-1 + eps, 1 - eps).acos()
        beyond = cosine - 0.5 * math.sin(0.5)
        return torch.where(angle < math.pi - 0.5, (angle + 0.5).cos(), beyond)

    return with_target(embeddings, weight, labels, scale, turned)


def of_tokens(n: int, generator: torch.Generator, converged: bool) -> Inputs:
    """Texts of up to L tokens, with a hard negative for each query; padding holds numbers, too."""
    queries, documents = (torch.randn(m, L + 1, D, generator=generator) for m in (n, 2 * n))
    query_mask, document_mask = (
        torch.arange(L + 1) <= torch.randint(L + 1, (m, 1), generator=generator) for m in (n, 2 * n)
    )
    for mask in (query_mask, document_mask):
        mask[-1:] = True
    if converged:
        documents[:n] = 3 * queries.flip(1)
        document_mask[:n] = True
    return {
        "queries": queries,
        "documents": documents,
        "query_mask": query_mask,
        "document_mask": document_mask,
    }


def maxsim(
    queries: Tensor, documents: Tensor, query_mask: Tensor, document_mask: Tensor, scale: float | Tensor = 1.0
) -> Tensor:
    q, d = (F.normalize(x, dim=2) for x in (queries, documents))
    of_tokens = torch.einsum("itd,jud->ijtu", q, d).masked_fill(~document_mask[:, None], -1e4)
    scores = of_tokens.amax(3).masked_fill(~query_mask[:, None], 0).sum(2)
    return F.cross_entropy(scale * scores, own(queries), reduction="none")


MARGIN = 0.15
QC = pairs("queries", "candidates")
OF_WINDOW = pairs("queries", "candidates", targets=window)
EVERY_LOSS = {
    "contrastive_loss": Loss(fastqt.contrastive_loss, OF_WINDOW, contrastive, one_row="size"),
    "contrastive_loss, Mixed": Loss(call_mixed, with_partners, mixed),
    "sigmoid_loss": Loss(fastqt.sigmoid_loss, OF_WINDOW, sigmoid, one_row="size"),
    "log_sum_exp": Loss(
        fastqt.log_sum_exp, QC, lambda queries, candidates: (queries @ candidates.T).logsumexp(1)
    ),
    "info_nce_loss": Loss(fastqt.info_nce_loss, pairs("queries", "candidates", "negatives"), info_nce),
    "info_nce_loss, margin": Loss(
        fastqt.info_nce_loss,
        pairs("queries", "candidates", "negatives"),
        info_nce_with_margin,
        {"exclude": fastqt.Margin(MARGIN)},
    ),
    "info_nce_loss, rows": Loss(call_padded, with_rows, padded),
    "info_nce_loss, debiased": Loss(
        fastqt.info_nce_loss,
        with_numbers(QC, scale=5.0),
        lambda queries, candidates, scale: debiased(queries, candidates, 0.02, scale),
        {"tau_plus": 0.02},
    ),
    "multiple_negatives_ranking_loss, Qwen3": Loss(call_qwen, with_rows, qwen),
    "simcse_loss": Loss(fastqt.simcse_loss, pairs("z1", "z2", "z3"), lambda z1, z2, z3: info_nce(z1, z2, z3)),
    "multiple_negatives_ranking_loss": Loss(
        fastqt.multiple_negatives_ranking_loss,
        pairs("queries", "documents"),
        lambda queries, documents: info_nce(queries, documents),
    ),
    "mixcse_loss": Loss(fastqt.mixcse_loss, pairs("z1", "z2"), mixcse, one_row="z2"),
    "mixcse_loss, released": Loss(
        fastqt.mixcse_loss, pairs("z1", "z2"), mixcse_released, {"form": "released"}, one_row="z2"
    ),
    "cosface_loss": Loss(fastqt.cosface_loss, with_numbers(classified, scale=20.0), cosface),
    "arcface_loss": Loss(fastqt.arcface_loss, with_numbers(classified, scale=20.0), arcface),
    "dcl_loss": Loss(fastqt.dcl_loss, with_numbers(pairs("z1", "z2"), scale=10.0), dcl, one_row="z2"),
    "hcl_loss": Loss(fastqt.hcl_loss, with_numbers(pairs("z1", "z2"), scale=2.0), hcl, one_row="z2"),
    "hcl_loss, debiased": Loss(
        fastqt.hcl_loss,
        with_numbers(pairs("z1", "z2"), scale=5.0),
        lambda z1, z2, scale: hcl(z1, z2, scale, 0.0, 0.02),
        {"beta": 0.0, "tau_plus": 0.02},
        one_row="z2",
    ),
    "distillation_loss": Loss(
        fastqt.distillation_loss,
        with_numbers(taught_pairs, scale=19.0),
        distillation,
        constant=("teacher_queries", "teacher_candidates"),
    ),
    "score_distillation_loss": Loss(
        fastqt.score_distillation_loss,
        with_numbers(of_candidates, scale=0.7),
        score_distillation,
        {"teacher_scale": 0.7},
        constant=("teacher_scores",),
    ),
    "margin_mse_loss": Loss(
        fastqt.margin_mse_loss,
        with_numbers(of_candidates, scale=1.0),
        margin_mse,
        constant=("teacher_scores",),
    ),
    "clip_loss": Loss(fastqt.clip_loss, with_numbers(pairs("a", "b"), scale=20.0), clip),
    "siglip_loss": Loss(
        fastqt.siglip_loss,
        with_numbers(pairs("a", "b"), scale=10.0, bias=-8.0),
        lambda a, b, scale, bias: binary(scale * cosines(a, b) + bias, torch.eye(len(a))),
    ),
    "sigmoid_loss, several positives": Loss(
        call_several_positives,
        with_numbers(pairs("queries", "candidates", targets=captions), scale=10.0, bias=-8.0),
        several_positives,
    ),
    "maxsim_loss": Loss(fastqt.maxsim_loss, with_numbers(of_tokens, scale=9.0), maxsim),
    "max_margin_loss": Loss(fastqt.max_margin_loss, OF_WINDOW, max_margin, one_row="size"),
    "curl_loss": Loss(fastqt.curl_loss, pairs("queries", "positives", "negatives"), curl),
    "curl_block_loss": Loss(fastqt.curl_block_loss, OF_WINDOW, curl_block, one_row="size"),
    "curl_block_loss, complement": Loss(
        fastqt.curl_block_loss,
        OF_WINDOW,
        lambda queries, candidates: curl_block(queries, candidates, "complement"),
        {"negatives": "complement"},
        one_row="size",
    ),
    "binary_window_loss": Loss(fastqt.binary_window_loss, OF_WINDOW, binary_window, one_row="size"),
    "binary_window_loss, documents": Loss(
        fastqt.binary_window_loss,
        lambda n, *given: OF_WINDOW(n, *given) | {"document_ids": DOCUMENTS[:n]},
        binary_window,
        one_row="size",
    ),
    "negative_sampling_loss": Loss(fastqt.negative_sampling_loss, drawn, negative_sampling),
    "gloss_bow_loss": Loss(fastqt.gloss_bow_loss, in_bags, gloss_bow),
    "gloss_pos_loss": Loss(fastqt.gloss_pos_loss, at_places, gloss_pos),
    "supcon_loss": Loss(fastqt.supcon_loss, labelled, supcon, fullgraph=False),
    "ntxent_loss": Loss(fastqt.ntxent_loss, labelled, ntxent, fullgraph=False),
    "lsep_loss": Loss(fastqt.lsep_loss, ranked_scores, ranking),
    "cosent_loss": Loss(fastqt.cosent_loss, ranked_pairs, cosent),
    "angle_loss": Loss(fastqt.angle_loss, ranked_pairs, angle),
    "spread_out_loss": Loss(fastqt.spread_out_loss, few_directions, spread_out),
    "spread_out_loss, squares": Loss(
        fastqt.spread_out_loss,
        few_directions,
        second_moment,
        {"mean_weight": 0.0, "hinge": False, "normalize": False},
    ),
    "flops_loss": Loss(fastqt.flops_loss, few_directions, flops),
    "similarity_distillation_loss": Loss(
        fastqt.similarity_distillation_loss, taught, distilled, constant=("teacher_embeddings",)
    ),
    "similarity_distillation_loss, candidates": Loss(
        fastqt.similarity_distillation_loss,
        taught_candidates,
        distilled,
        constant=("teacher_embeddings", "teacher_candidates"),
    ),
    "gist_embed_loss": Loss(
        fastqt.gist_embed_loss,
        guided,
        gist,
        {"scale": 20.0},
        constant=("guide_anchors", "guide_positives"),
        fullgraph=False,
    ),
}
OF_PREFIXES = (
    *("contrastive_loss", "sigmoid_loss", "info_nce_loss", "simcse_loss", "multiple_negatives_ranking_loss"),
    *("clip_loss", "siglip_loss", "supcon_loss"),
)
EVERY_LOSS |= {f"{name}, Matryoshka": of_prefixes(name) for name in OF_PREFIXES}

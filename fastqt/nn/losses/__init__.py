"""Each loss as a module: its function, and what differs from the function or is checked beside it.

The bases read the options from the function's signature. Type checkers read __init__.pyi, which `make stub`
writes from the same signatures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fastqt import functional, losses
from fastqt.nn.losses.base import BiasedLoss, Loss, ScaledLoss


class ContrastiveLoss(ScaledLoss):
    """`fastqt.contrastive_loss` with its options fixed; `bias` is an argument of each call.

    A call takes the embeddings, the targets, and of the function's keyword arguments those that belong to a
    batch: those that may be tensors or a guide, such as `negatives` and `mask`, but not the scale.

    Args:
        scale: the scale, 1 / temperature, a number > 0; where it is learnt, what it is at first.
        learn_scale: learn the scale as the parameter `log_scale`, its logarithm, so that it stays positive.
        max_scale: the most that the scale may be, or None; see `fastqt.nn.losses.base.ScaledLoss`.

    Raises:
        TypeError: an option that the loss does not have, or that has a value of another type.
        ValueError: a value that the function refuses.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.ContrastiveLoss(context_size=1, normalize=True, learn_scale=True)
        >>> queries, candidates = torch.randn(2, 8, 16)
        >>> criterion(queries, candidates, document_ids=torch.arange(8) // 4).shape
        torch.Size([])
        >>> [name for name, _ in criterion.named_parameters()]
        ['log_scale']
    """

    function = staticmethod(functional.contrastive_loss)


class SigmoidLoss(ScaledLoss):
    """`fastqt.sigmoid_loss` with its options fixed; the scale, 1 / temperature, is as in `ContrastiveLoss`.

    A call takes the same arguments as that of `ContrastiveLoss`. Most options are as of `contrastive_loss`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.SigmoidLoss(scale=2.0, reduction="none")
        >>> queries, candidates = torch.randn(2, 8, 16)
        >>> criterion(queries, candidates, bias=-1.0).shape
        torch.Size([8])
    """

    function = staticmethod(functional.sigmoid_loss)


class InfoNCELoss(ScaledLoss):
    """`fastqt.info_nce_loss` with its options fixed; the scale, 1 / temperature, is as in `ContrastiveLoss`.

    A call takes queries, candidates, and the keyword arguments `negatives` and `guide`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.InfoNCELoss(scale=1 / 0.05)  # a temperature of 0.05
        >>> queries, candidates = torch.randn(2, 8, 16)
        >>> bool(criterion(queries, queries) < criterion(queries, candidates))
        True
    """

    function = staticmethod(losses.info_nce_loss)


class SimCSELoss(ScaledLoss):
    """`fastqt.simcse_loss` with its options fixed; the scale, 1 / temperature, is as in `ContrastiveLoss`.

    A call takes the views z1 and z2, and the hard negatives z3 if there are any.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.SimCSELoss(scale=1 / 0.05)  # a temperature of 0.05
        >>> z1, z2, z3 = torch.randn(3, 8, 16)
        >>> bool(criterion(z1, z2, z3) > criterion(z1, z2))  # z3 has further negatives
        True
    """

    function = staticmethod(losses.simcse_loss)


class DCLLoss(ScaledLoss):
    """`fastqt.dcl_loss` with its options fixed; the scale, 1 / temperature, is as in `ContrastiveLoss`.

    A call takes the views z1 and z2.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.DCLLoss(scale=1 / 0.1, sigma=0.5)  # the weights of DCLW
        >>> z1, z2 = torch.randn(2, 8, 16)
        >>> criterion(z1, z2).shape
        torch.Size([])
    """

    function = staticmethod(losses.dcl_loss)


class HCLLoss(ScaledLoss):
    """`fastqt.hcl_loss` with its options fixed; the scale, 1 / temperature, is as in `ContrastiveLoss`.

    A call takes the views z1 and z2.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.HCLLoss(scale=1 / 0.5, beta=0.0)  # the debiased loss
        >>> z1, z2 = torch.randn(2, 8, 16)
        >>> criterion(z1, z2).shape
        torch.Size([])
    """

    function = staticmethod(losses.hcl_loss)


class CosFaceLoss(ScaledLoss):
    """`fastqt.cosface_loss` with its options fixed; the scale, 1 / temperature, is as in `ContrastiveLoss`.

    A call takes the embeddings, the classes' vectors, which are a parameter of yours, and the labels.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.CosFaceLoss(margin=0.2)
        >>> classes = torch.nn.Parameter(torch.randn(1000, 16))
        >>> criterion(torch.randn(8, 16), classes, torch.arange(8)).shape
        torch.Size([])
    """

    function = staticmethod(losses.cosface_loss)


class ArcFaceLoss(ScaledLoss):
    """`fastqt.arcface_loss` with its options fixed; the scale, 1 / temperature, is as in `ContrastiveLoss`.

    A call takes the embeddings, the classes' vectors, which are a parameter of yours, and the labels.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.ArcFaceLoss(scale=30.0)
        >>> classes = torch.nn.Parameter(torch.randn(1000, 16))
        >>> criterion(torch.randn(8, 16), classes, torch.arange(8)).shape
        torch.Size([])
    """

    function = staticmethod(losses.arcface_loss)


class DistillationLoss(ScaledLoss):
    """`fastqt.distillation_loss` with its options fixed; the scale, 1 / temperature, as in `ContrastiveLoss`.

    A call takes queries and candidates, and those of the teacher.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.DistillationLoss(scale=1 / 0.05, teacher_scale=1 / 0.02)
        >>> queries, candidates = torch.randn(2, 8, 16)
        >>> of_teacher = torch.randn(2, 8, 32)
        >>> criterion(queries, candidates, *of_teacher).shape
        torch.Size([])
    """

    function = staticmethod(losses.distillation_loss)


class MaxSimLoss(ScaledLoss):
    """`fastqt.maxsim_loss` with its options fixed; the scale, 1 / temperature, is as in `ContrastiveLoss`.

    A call takes the vectors of the queries' and the documents' tokens, (N, Tq, D) and (M, Td, D), and the
    keyword arguments `query_mask` and `document_mask`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.MaxSimLoss(scale=1 / 0.05)  # a temperature of 0.05
        >>> queries, documents = torch.randn(8, 5, 16), torch.randn(8, 9, 16)
        >>> criterion(queries, documents, document_mask=torch.arange(9).expand(8, 9) < 7).shape
        torch.Size([])
    """

    function = staticmethod(losses.maxsim_loss)


class MixCSELoss(ScaledLoss):
    """`fastqt.mixcse_loss` with its options fixed; the scale, 1 / temperature, is as in `ContrastiveLoss`.

    A call takes the views z1 and z2, and the keyword argument `generator`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.MixCSELoss(mix=0.2, form="released")
        >>> z1, z2 = torch.randn(2, 8, 16)
        >>> criterion(z1, z2).shape
        torch.Size([])
    """

    function = staticmethod(losses.mixcse_loss)


class CLIPLoss(ScaledLoss):
    """`fastqt.clip_loss` with its options fixed; by default the scale is learnt.

    A call takes two embeddings (N, D), whose rows of equal index are a pair. The scale, 1 / temperature, is
    as in `ContrastiveLoss`; by default it begins at the CLIP paper's 1 / 0.07, and is 100 at most.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.CLIPLoss()
        >>> images, texts = torch.randn(2, 8, 16)
        >>> criterion(images, texts).backward()
        >>> round(criterion.scale.item(), 2), criterion.log_scale.grad is not None
        (14.29, True)
    """

    function = staticmethod(losses.clip_loss)
    defaults: ClassVar[Mapping[str, Any]] = {"scale": 1 / 0.07, "learn_scale": True, "max_scale": 100.0}


class SigLIPLoss(BiasedLoss):
    """`fastqt.siglip_loss` with its options fixed; by default scale and bias are learnt.

    A call takes two embeddings (N, D) and (M, D), whose rows of equal index are a pair. The scale,
    1 / temperature, is as in `ContrastiveLoss`.

    Args:
        bias: the initial bias, a finite number; by default the SigLIP paper's -10, beside a scale of 10.
        learn_bias: learn the bias as a parameter.

    Raises:
        TypeError, ValueError: as in `ContrastiveLoss`, or a bias that is not a finite number.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.SigLIPLoss()
        >>> images, texts = torch.randn(2, 8, 16)
        >>> criterion(images, texts).backward()
        >>> [(name, p.shape) for name, p in criterion.named_parameters()]
        [('log_scale', torch.Size([1])), ('bias', torch.Size([1]))]
    """

    function = staticmethod(losses.siglip_loss)
    defaults: ClassVar[Mapping[str, Any]] = {
        "scale": 10.0,
        "learn_scale": True,
        "bias": -10.0,
        "learn_bias": True,
    }


class GISTEmbedLoss(ScaledLoss):
    """`fastqt.gist_embed_loss` with its options fixed; the guide's embeddings are arguments of each call.

    A call takes anchors, positives, negatives if there are any, and the keyword arguments `guide_anchors`,
    `guide_positives` and `guide_negatives`. The scale, 1 / temperature, is as in `ContrastiveLoss`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.GISTEmbedLoss(scale=100.0)  # a temperature of 0.01
        >>> anchors, positives = torch.randn(2, 8, 16)
        >>> of_guide = torch.randn(2, 8, 32)
        >>> criterion(anchors, positives, guide_anchors=of_guide[0], guide_positives=of_guide[1]).shape
        torch.Size([])
    """

    function = staticmethod(losses.gist_embed_loss)


class MultipleNegativesRankingLoss(ScaledLoss):
    """`fastqt.multiple_negatives_ranking_loss` with its options fixed.

    A call takes queries (N, D), and documents (N, D) or a sequence of such matrices. The scale,
    1 / temperature, is as in `ContrastiveLoss`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.MultipleNegativesRankingLoss(directions=("query_to_doc", "doc_to_query"))
        >>> queries, positives, hard_negatives = torch.randn(3, 8, 16)
        >>> criterion(queries, [positives, hard_negatives]).shape
        torch.Size([])
    """

    function = staticmethod(losses.multiple_negatives_ranking_loss)


class SupConLoss(ScaledLoss):
    """`fastqt.supcon_loss` with its options fixed; the scale, 1 / temperature, is as in `ContrastiveLoss`.

    A call takes embeddings (N, D), labels (N,), and the keyword arguments `candidates` and
    `candidate_labels`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.SupConLoss(scale=1 / 0.1)  # a temperature of 0.1
        >>> embeddings, labels = torch.randn(8, 16), torch.arange(8) % 4
        >>> criterion(embeddings, labels).shape
        torch.Size([])
    """

    function = staticmethod(losses.supcon_loss)


class NTXentLoss(ScaledLoss):
    """`fastqt.ntxent_loss` with its options fixed; the scale, 1 / temperature, is as in `ContrastiveLoss`.

    A call takes the same arguments as that of `SupConLoss`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.NTXentLoss(scale=1 / 0.5)  # a temperature of 0.5
        >>> embeddings, labels = torch.randn(8, 16), torch.arange(8) % 4  # two views of four texts
        >>> criterion(embeddings, labels).shape
        torch.Size([])
    """

    function = staticmethod(losses.ntxent_loss)


class NegativeSamplingLoss(ScaledLoss):
    """`fastqt.negative_sampling_loss` with its options fixed.

    A call takes queries, candidates, and the indices of positives (N,) and of negatives (N, K). The scale,
    1 / temperature, is as in `ContrastiveLoss`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.NegativeSamplingLoss()
        >>> words, contexts = torch.randn(2, 100, 16)
        >>> pairs = torch.randint(100, (8, 2))
        >>> noise = fastqt.Noise(torch.ones(100)).draw(8, 5)
        >>> criterion(words[pairs[:, 0]], contexts, pairs[:, 1], noise).shape
        torch.Size([])
    """

    function = staticmethod(losses.negative_sampling_loss)


class LSEPLoss(ScaledLoss):
    """`fastqt.lsep_loss` with its options fixed; the scale, 1 / temperature, is as in `ContrastiveLoss`.

    A call takes scores (N,) and labels (N,).

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.LSEPLoss(scale=2.0)
        >>> round(criterion(torch.tensor([0.5, 0.0]), torch.tensor([1, 0])).item(), 4)  # log(1 + 1 / e)
        0.3133
    """

    function = staticmethod(losses.lsep_loss)


class CoSENTLoss(ScaledLoss):
    """`fastqt.cosent_loss` with its options fixed; the scale, 1 / temperature, is as in `ContrastiveLoss`.

    A call takes the two sides of the pairs, (N, D) each, and their labels (N,).

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.CoSENTLoss(scale=20.0)
        >>> a, b = torch.randn(2, 8, 16)
        >>> criterion(a, b, torch.rand(8)).shape
        torch.Size([])
    """

    function = staticmethod(losses.cosent_loss)


class AnglELoss(ScaledLoss):
    """`fastqt.angle_loss` with its options fixed; the scale, 1 / temperature, is as in `ContrastiveLoss`.

    A call takes the same arguments as that of `CoSENTLoss`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.AnglELoss(learn_scale=True)
        >>> a, b = torch.randn(2, 8, 16)
        >>> criterion(a, b, torch.rand(8)).shape
        torch.Size([])
    """

    function = staticmethod(losses.angle_loss)


class SpreadOutLoss(Loss):
    """`fastqt.spread_out_loss` with its options fixed.

    A call takes embeddings (N, D).

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.SpreadOutLoss(mean_weight=0.0, hinge=False)
        >>> round(criterion(torch.ones(8, 4)).item(), 4)  # all scores are 1
        1.0
    """

    function = staticmethod(losses.spread_out_loss)


class SimilarityDistillationLoss(Loss):
    """`fastqt.similarity_distillation_loss` with its options fixed.

    A call takes the student's embeddings (N, D), the teacher's (N, E), and the keyword arguments `candidates`
    and `teacher_candidates`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.SimilarityDistillationLoss(normalize=False)
        >>> criterion(torch.eye(4), torch.zeros(4, 6)).item()  # 4 of 16 scores are 1 in place of 0
        0.25
    """

    function = staticmethod(losses.similarity_distillation_loss)


class MaxMarginLoss(Loss):
    """`fastqt.max_margin_loss` with its options fixed.

    A call takes queries, candidates, targets if they are no window, and the keyword argument `document_ids`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.MaxMarginLoss(margin=0.5, context_size=1)
        >>> queries, candidates = torch.randn(2, 8, 16)
        >>> criterion(queries, candidates, document_ids=torch.arange(8) // 4).shape
        torch.Size([])
    """

    function = staticmethod(losses.max_margin_loss)


class BinaryWindowLoss(Loss):
    """`fastqt.binary_window_loss` with its options fixed.

    A call takes queries, candidates, and the keyword arguments `document_ids` and `generator`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.BinaryWindowLoss(context_size=2, samples=3)
        >>> queries, candidates = torch.randn(2, 8, 16)
        >>> criterion(queries, candidates).shape
        torch.Size([])
    """

    function = staticmethod(losses.binary_window_loss)


class CURLLoss(Loss):
    """`fastqt.curl_loss` with its options fixed.

    A call takes queries, positives and negatives, (N, D) each.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.CURLLoss(reduction="none")
        >>> queries, positives, negatives = torch.randn(3, 8, 16)
        >>> criterion(queries, positives, negatives).shape
        torch.Size([8])
    """

    function = staticmethod(losses.curl_loss)


class CURLBlockLoss(Loss):
    """`fastqt.curl_block_loss` with its options fixed.

    A call takes queries, candidates, and the keyword arguments `document_ids` and `generator`.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.CURLBlockLoss(context_size=1, negatives="complement")
        >>> queries, candidates = torch.randn(2, 8, 16)
        >>> criterion(queries, candidates).shape
        torch.Size([])
    """

    function = staticmethod(losses.curl_block_loss)


class GlossBagOfWordsLoss(Loss):
    """`fastqt.gloss_bow_loss` with its options fixed.

    A call takes latents, weight, bias, token_ids and offsets.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.GlossBagOfWordsLoss()
        >>> latents, weight, bias = torch.randn(2, 8), torch.randn(10, 8), torch.zeros(10)
        >>> words, offsets = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 3])  # of three words and of one
        >>> criterion(latents, weight, bias, words, offsets).shape
        torch.Size([])
    """

    function = staticmethod(losses.gloss_bow_loss)


class GlossPositionalLoss(Loss):
    """`fastqt.gloss_pos_loss` with its options fixed.

    A call takes latents, positions, weight, bias, token_ids and lengths.

    Example:
        >>> import torch, fastqt
        >>> criterion = fastqt.nn.GlossPositionalLoss(position_loss="mean")
        >>> latents, positions = torch.randn(2, 8), torch.randn(3, 8)
        >>> weight, bias = torch.randn(10, 8), torch.zeros(10)
        >>> words, lengths = torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([3, 1])
        >>> criterion(latents, positions, weight, bias, words, lengths).shape
        torch.Size([])
    """

    function = staticmethod(losses.gloss_pos_loss)

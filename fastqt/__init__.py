"""Exact contrastive losses at the speed of their matrix products, without the score matrix."""

from importlib import import_module
from typing import TYPE_CHECKING

from fastqt._version import __version__

if TYPE_CHECKING:
    from fastqt import distributed, nn, optim
    from fastqt import integrations as integrations
    from fastqt import options as options
    from fastqt import sentences as sentences
    from fastqt.cached import cached_backward
    from fastqt.compiling import warm_up
    from fastqt.engines import show_config
    from fastqt.exclusions import Above, Guide, Margin, Padding, Same, Within
    from fastqt.functional import candidate_scores, contrastive_loss, log_sum_exp, sigmoid_loss
    from fastqt.losses import (
        angle_loss,
        arcface_loss,
        binary_window_loss,
        clip_loss,
        cosent_loss,
        cosface_loss,
        curl_block_loss,
        curl_loss,
        dcl_loss,
        distillation_loss,
        flops_loss,
        gist_embed_loss,
        gloss_bow_loss,
        gloss_pos_loss,
        hcl_loss,
        info_nce_loss,
        lsep_loss,
        margin_mse_loss,
        max_margin_loss,
        maxsim_loss,
        maxsim_scores,
        mixcse_loss,
        multiple_negatives_ranking_loss,
        negative_sampling_loss,
        ntxent_loss,
        score_distillation_loss,
        siglip_loss,
        simcse_loss,
        similarity_distillation_loss,
        spread_out_loss,
        supcon_loss,
    )
    from fastqt.matryoshka import Matryoshka
    from fastqt.negatives import Mixed, Noise
    from fastqt.promises import fused
    from fastqt.quantization import quantization_ranges, quantized
    from fastqt.sentences.inference.encoder import load
    from fastqt.splade import splade_pool
    from fastqt.targets import Diagonal, Sparse, Window, smoothed

__all__ = [
    "Above",
    "Diagonal",
    "Guide",
    "Margin",
    "Matryoshka",
    "Mixed",
    "Noise",
    "Padding",
    "Same",
    "Sparse",
    "Window",
    "Within",
    "__version__",
    "angle_loss",
    "arcface_loss",
    "binary_window_loss",
    "cached_backward",
    "candidate_scores",
    "clip_loss",
    "contrastive_loss",
    "cosent_loss",
    "cosface_loss",
    "curl_block_loss",
    "curl_loss",
    "dcl_loss",
    "distillation_loss",
    "distributed",
    "flops_loss",
    "fused",
    "gist_embed_loss",
    "gloss_bow_loss",
    "gloss_pos_loss",
    "hcl_loss",
    "info_nce_loss",
    "load",
    "log_sum_exp",
    "lsep_loss",
    "margin_mse_loss",
    "max_margin_loss",
    "maxsim_loss",
    "maxsim_scores",
    "mixcse_loss",
    "multiple_negatives_ranking_loss",
    "negative_sampling_loss",
    "nn",
    "ntxent_loss",
    "optim",
    "quantization_ranges",
    "quantized",
    "score_distillation_loss",
    "show_config",
    "siglip_loss",
    "sigmoid_loss",
    "simcse_loss",
    "similarity_distillation_loss",
    "smoothed",
    "splade_pool",
    "spread_out_loss",
    "supcon_loss",
    "warm_up",
]


# Modules that `import fastqt` alone gives access to. A star does not import those that are not in `__all__`,
# which few want, or which want optional libraries.
_MODULES = ("distributed", "integrations", "nn", "optim", "options", "sentences")


def __dir__() -> list[str]:
    """The public names and modules, without what importing them brings along."""
    return sorted({*__all__, *_MODULES})


# Where the public names are found when they are first used: `fastqt --help` answers without importing torch.
_HOMES = (
    "functional",
    "losses",
    "targets",
    "negatives",
    "exclusions",
    "matryoshka",
    "quantization",
    "splade",
    "engines",
    "cached",
    "compiling",
    "promises",
    "sentences.inference.encoder",
)

if not TYPE_CHECKING:  # for a type checker, a name that is not imported above is an error

    def __getattr__(name: str) -> object:
        """Imports a public name; Python calls this for names that the module does not hold yet."""
        if name in _MODULES:
            return import_module(f".{name}", __name__)
        for place in _HOMES if name in __all__ else ():
            home = import_module(f".{place}", __name__)
            if hasattr(home, name):
                return globals().setdefault(name, getattr(home, name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

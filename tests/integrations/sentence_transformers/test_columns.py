"""The loss module for sentence-transformers, against that library's own loss."""

import pytest
import torch

import fastqt
from fastqt.integrations.sentence_transformers import CachedLoss, SentenceTransformerLoss
from tests.shared.small_encoders import distance
from tests.shared.tolerances import FLOAT32, relative

COLUMNS = (
    ["the cat sat on a mat .", "cats", "a cat .", "the mat"],
    ["the cat", "cats .", "a cat", "the mats"],
    ["on a mat", "the mat sat .", ". .", "a"],
)


@pytest.fixture(scope="module")
def model(checkpoint):
    library = pytest.importorskip("sentence_transformers", reason="the extra st is not installed")
    return library.SentenceTransformer(str(checkpoint), device="cpu", local_files_only=True).eval()


def features(model, columns):
    return [dict(model.preprocess(column)) for column in columns]


@pytest.mark.parametrize("columns", [2, 3, 4])
@pytest.mark.parametrize("name", ["default", "simcse"])
def test_default_loss_equals_multiple_negatives_ranking_loss(model, columns, name):
    """With dropout, which draws the same numbers as there."""
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    given = (*COLUMNS, COLUMNS[1])[:columns]
    ours = SentenceTransformerLoss(model, **({"loss": fastqt.simcse_loss} if name == "simcse" else {}))
    if columns == 4 and name == "simcse":
        with pytest.raises(ValueError, match=r"at most 3 columns for simcse_loss, got 4; MultipleNeg"):
            ours(features(model, given))
        return
    results = []
    model.train()
    for loss in (ours, MultipleNegativesRankingLoss(model)):
        model.zero_grad()
        torch.manual_seed(0)
        value = loss(features(model, given), torch.zeros(4))
        value.backward()
        results.append([value, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    model.eval()
    largest = max(gradient.abs().max() for gradient in results[1][1:])
    assert relative(results[0][0], results[1][0]) <= FLOAT32
    for ours, theirs in zip(results[0][1:], results[1][1:], strict=True):
        assert (ours - theirs).abs().max() <= FLOAT32 * largest


def test_settings_and_citation_of_the_default(model):
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    for loss in (SentenceTransformerLoss(model, scale=3.0), CachedLoss(model, scale=3.0)):
        config = loss.get_config_dict()
        assert (config["loss"], config["scale"]) == ("multiple_negatives_ranking_loss", 3.0)
        assert loss.citation == MultipleNegativesRankingLoss(model).citation
    assert not hasattr(SentenceTransformerLoss(model, fastqt.mixcse_loss), "citation")


def test_other_loss_and_its_options(model):
    loss = SentenceTransformerLoss(model, fastqt.mixcse_loss, mix=0.3)
    found = loss(features(model, COLUMNS[:2]))
    embeddings = [model(f)["sentence_embedding"] for f in features(model, COLUMNS[:2])]
    assert relative(found, fastqt.mixcse_loss(*embeddings, mix=0.3)) <= FLOAT32
    assert loss.get_config_dict() == {"loss": "mixcse_loss", "mix": 0.3}


def test_the_margin_of_false_negatives(model):
    """It is an option that the library's ranking loss does not have."""
    options = {"directions": ("query_to_doc", "doc_to_doc"), "false_negative_margin": -0.05}
    for kind, how in ((SentenceTransformerLoss, {}), (CachedLoss, {"mini_batch_size": 2})):
        loss = kind(model, **how, **options)
        queries, *documents = (model(f)["sentence_embedding"] for f in features(model, COLUMNS))
        wanted = fastqt.multiple_negatives_ranking_loss(queries, documents, **options)
        without = fastqt.multiple_negatives_ranking_loss(queries, documents, directions=options["directions"])
        assert wanted < without
        assert relative(loss(features(model, COLUMNS)), wanted) <= FLOAT32
        assert loss.get_config_dict()["false_negative_margin"] == -0.05


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


def test_options_of_any_callable_are_taken():
    SentenceTransformerLoss(torch.nn.Identity(), fastqt.contrastive_loss, bias=torch.zeros(3), context_size=2)
    SentenceTransformerLoss(torch.nn.Identity(), lambda *z, **options: z[0].sum(), anything=1)
    SentenceTransformerLoss(torch.nn.Identity(), fastqt.nn.SimCSELoss())


def gradients(model):
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("mini_batch_size", [1, 3, 4])
def test_a_cached_loss_has_the_gradients_of_the_uncached_one(model, mini_batch_size):
    results = []
    for loss in (SentenceTransformerLoss(model), CachedLoss(model, mini_batch_size=mini_batch_size)):
        model.zero_grad()
        value = loss(features(model, COLUMNS), torch.zeros(4))
        (value * 2).backward()
        results.append((value, gradients(model)))
    (wanted, theirs), (found, ours) = results
    assert relative(found, wanted) <= FLOAT32
    assert distance(ours, theirs) <= FLOAT32


def test_a_cached_loss_draws_dropout_as_the_librarys_own_does(model):
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

    # As long as each other: the library cuts padding off mini-batches, which then draw fewer numbers.
    columns = (["the cat", "a mat", "cats .", "the mats"], ["a cat", "the mat", "a cats", "mats ."])
    results = []
    model.train()
    for kind in (CachedLoss, CachedMultipleNegativesRankingLoss):
        model.zero_grad()
        torch.manual_seed(0)
        value = kind(model, mini_batch_size=3)(features(model, columns), torch.zeros(4))
        value.backward()
        results.append((value, gradients(model)))
    model.eval()
    (found, ours), (wanted, theirs) = results
    assert relative(found, wanted) <= FLOAT32
    assert distance(ours, theirs) <= FLOAT32


def test_settings_of_a_cached_loss(model):
    loss = CachedLoss(model, fastqt.mixcse_loss, mini_batch_size=2, mix=0.3)
    assert loss.get_config_dict() == {"loss": "mixcse_loss", "mix": 0.3, "mini_batch_size": 2}
    with torch.no_grad():
        assert not loss(features(model, COLUMNS[:2])).requires_grad
    with pytest.raises(ValueError, match="mini_batch_size: want at least 1, got 0"):
        CachedLoss(model, mini_batch_size=0)
    with pytest.raises(ValueError, match="check: want one of"):
        CachedLoss(model, check="last")
    with pytest.raises(ValueError, match=r"sentence_features: want padded sentences, .* got 'offsets'"):
        loss([{"input_ids": torch.arange(4), "offsets": torch.arange(4)}])


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.thinned(2)
def test_training_with_a_cached_loss_is_training_with_the_uncached_one(checkpoint, tmp_path, accumulation):
    library = pytest.importorskip("sentence_transformers", reason="the extra st is not installed")
    datasets = pytest.importorskip("datasets", reason="the extra st is not installed")
    pytest.importorskip("accelerate", reason="the extra st is not installed")
    rows = {"anchor": COLUMNS[0] * 3, "positive": COLUMNS[1] * 3}
    trained = []
    for cached in (False, True):
        model = library.SentenceTransformer(str(checkpoint), device="cpu", local_files_only=True)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):  # which draws other numbers in mini-batches
                module.p = 0.0
        loss = CachedLoss(model, mini_batch_size=3) if cached else SentenceTransformerLoss(model)
        arguments = library.SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path / str(cached)),
            per_device_train_batch_size=6 // accumulation,
            gradient_accumulation_steps=accumulation,
            num_train_epochs=2,
            learning_rate=0.1,
            optim="sgd",
            lr_scheduler_type="constant",
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        before = [p.detach().clone() for p in model.parameters()]
        library.SentenceTransformerTrainer(
            model=model, args=arguments, train_dataset=datasets.Dataset.from_dict(rows), loss=loss
        ).train()
        trained.append([p.detach().cpu() - b for p, b in zip(model.parameters(), before, strict=True)])
    assert max(float(change.abs().max()) for change in trained[0]) > 1e-2
    assert distance(trained[1], trained[0]) <= FLOAT32

"""The library's trainer of static embeddings, accelerated, learns the same and writes the same files."""

import copy
import itertools
import json
import pickle

import numpy as np
import pytest
import torch

from tests.shared.tolerances import FLOAT32, relative

st = pytest.importorskip("sentence_transformers", reason="the extra st is not installed")
datasets = pytest.importorskip("datasets", reason="the extra st is not installed")
pytest.importorskip("accelerate", reason="the extra st is not installed")

# The library can be imported after the skips alone.
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer  # noqa: E402
from sentence_transformers import SentenceTransformerTrainingArguments as Arguments  # noqa: E402
from sentence_transformers.sentence_transformer import losses  # noqa: E402
from sentence_transformers.sentence_transformer import modules as library  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

from fastqt.integrations.sentence_transformers import StaticEmbedding, accelerate_static  # noqa: E402
from fastqt.nn import sparse_gradients  # noqa: E402

V, D, BATCH, STEPS = 500, 32, 16, 40


@pytest.fixture(scope="module")
def tokenizer():
    words = {"[UNK]": 0} | {f"w{i}": i for i in range(1, V)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


@pytest.fixture(scope="module")
def pairs():
    """Pairs that share words, of which a few are frequent; some texts come twice, and some are empty."""
    draw = np.random.default_rng(0)
    words = [[f"w{i}" for i in (V * draw.random(draw.integers(1, 9)) ** 3).astype(int)] for _ in range(660)]
    anchors = [" ".join(text) for text in words]
    positives = [" ".join(text[1:] + other[:2]) for text, other in itertools.pairwise(words)]
    anchors[7] = positives[9] = ""
    return datasets.Dataset.from_dict({"anchor": [*anchors[:-1]], "positive": positives}).select(
        [*range(650), 3]
    )


@pytest.fixture
def model(tokenizer):
    torch.manual_seed(0)
    module = library.StaticEmbedding(Tokenizer.from_str(tokenizer.to_str()), embedding_dim=D)
    return SentenceTransformer(modules=[module], device="cpu")


def matryoshka(model, kind=losses):
    return kind.MatryoshkaLoss(model, kind.MultipleNegativesRankingLoss(model), [D, D // 2, D // 4])


def trainer_of(model, pairs, folder, *, loss=None, accelerate=None, **options):
    """A trainer with the values of its loss, of which `accelerate` has the rows of an accelerated one."""
    settings = {
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 0.02,
        "weight_decay": 0.1,
        "warmup_steps": 5,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "use_cpu": True,
        **options,
    }
    datasets_of = {name: settings.pop(name) for name in ("eval_dataset",) if name in settings}
    trainer = SentenceTransformerTrainer(
        model,
        Arguments(str(folder), **settings),
        train_dataset=pairs,
        loss=loss or matryoshka(model),
        **datasets_of,
    )
    trainer.values = []
    trainer.loss.register_forward_hook(lambda *call: trainer.values.append(call[-1].item()))
    return trainer if accelerate is None else accelerate_static(trainer, rows=accelerate)


def table_of(model):
    return model.state_dict()["0.embedding.weight"].clone()


def trained(model, *arguments, resume=None, **options):
    trainer = trainer_of(model, *arguments, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ("all", {}),
        ("replayed", {}),
        ("replayed", {"max_grad_norm": 0.05}),
        ("replayed", {"max_grad_norm": 0.0}),
        ("replayed", {"gradient_accumulation_steps": 2, "max_steps": 20}),
    ],
    ids=["dense", "replayed", "clipped", "not clipped", "accumulated"],
)
def test_the_curve_is_that_of_the_library(model, pairs, tmp_path, rows, options):
    # Some gradients are nothing but rounding errors. An eps that is large beside them keeps Adam from making
    # steps of full length of these, as the library's own tables show where they begin one rounding away.
    options = {"adam_epsilon": 1e-4, **options}
    other, nudged = copy.deepcopy(model), copy.deepcopy(model)
    theirs = trained(other, pairs, tmp_path, **options)
    with torch.no_grad():  # by one rounding each
        weight = nudged[0].embedding.weight
        weight *= 1 + 2.0**-23 * torch.randint(
            -1, 2, weight.shape, generator=torch.Generator().manual_seed(0)
        )
    trained(nudged, pairs, tmp_path, **options)
    found = trained(model, pairs, tmp_path, accelerate=rows, **options)
    assert isinstance(model[0], StaticEmbedding)
    assert len(found.values) == STEPS
    assert relative(torch.tensor(found.values), torch.tensor(theirs.values)) < 1e-6
    assert found.values[-1] < 0.8 * found.values[0]
    norms = [[log["grad_norm"] for log in x.state.log_history if "grad_norm" in log] for x in (found, theirs)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    # The library's own tables differ by as much where it begins one rounding away.
    difference, noise = ((table_of(x) - table_of(other)).norm() for x in (model, nudged))
    assert difference <= 4 * noise


def test_the_columns_of_a_step_have_one_gradient(model, pairs, tmp_path, monkeypatch):
    """Sorted and summed once, which the optimiser and the clipping need not do again."""
    sums = []
    real = sparse_gradients.sum_by_row
    monkeypatch.setattr(sparse_gradients, "sum_by_row", lambda *args: sums.append(0) or real(*args))
    three = pairs.add_column("negative", pairs["anchor"][1:] + pairs["anchor"][:1])
    trained(model, three, tmp_path, accelerate="replayed", max_steps=5)
    assert len(sums) == 5


class Unusual(torch.nn.Module):
    """A loss that embeds the last column alone, that twice, and once without a gradient in between."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, columns, labels):
        *_, last = columns
        first = self.model(dict(last))["sentence_embedding"]
        with torch.no_grad():
            constant = self.model(dict(last))["sentence_embedding"]
        assert not constant.requires_grad
        again = self.model({"input_ids": last["input_ids"].clone(), "offsets": last["offsets"]})
        second = self.model(dict(last))["sentence_embedding"]
        weights = torch.linspace(0.5, 1, D)
        return ((first + 2 * second + 3 * again["sentence_embedding"] - constant) * weights).square().mean()


def test_losses_may_embed_columns_as_they_like(model, pairs, tmp_path):
    other = copy.deepcopy(model)
    theirs = trained(other, pairs, tmp_path, loss=Unusual(other), max_steps=5)
    ours = trained(model, pairs, tmp_path, loss=Unusual(model), accelerate="all", max_steps=5)
    assert relative(torch.tensor(ours.values), torch.tensor(theirs.values)) < 1e-6
    copy.deepcopy(model)  # which nothing of a step's graph hinders


def test_a_column_whose_table_has_changed_is_embedded_anew(tokenizer):
    module = StaticEmbedding(tokenizer, embedding_dim=D, sparse=True)
    columns = [module.preprocess(texts) for texts in (["w1 w2", "w3"], ["w2", "w4 w1"])]
    with module.together(columns):
        module(dict(columns[0]))
        with torch.no_grad():
            module.embedding.weight *= 2
        changed = module(dict(columns[1]))["sentence_embedding"]
    assert torch.equal(changed, module(dict(columns[1]))["sentence_embedding"])


def test_files_are_those_of_the_library(model, pairs, tmp_path):
    trained(model, pairs, tmp_path, accelerate="replayed", max_steps=4)
    model.save_pretrained(str(tmp_path / "ours"))  # before any other reading brings rows up to date
    texts = [*pairs["anchor"][:50], "never seen", ""]
    wanted = model.encode(texts)

    modules = json.loads((tmp_path / "ours" / "modules.json").read_text())
    kind = library.StaticEmbedding
    assert [x["type"] for x in modules] == [f"{kind.__module__}.{kind.__name__}"]
    theirs = SentenceTransformer(str(tmp_path / "ours"), device="cpu", local_files_only=True)
    assert type(theirs[0]) is kind
    assert [*theirs.state_dict()] == ["0.embedding.weight"]
    assert np.array_equal(theirs.encode(texts), wanted)

    theirs.save_pretrained(str(tmp_path / "theirs"))
    back = StaticEmbedding.load(str(tmp_path / "theirs"))
    assert type(back) is StaticEmbedding
    for again in (back, pickle.loads(pickle.dumps(back)), copy.deepcopy(back)):
        assert np.array_equal(SentenceTransformer(modules=[again], device="cpu").encode(texts), wanted)


def test_a_training_that_is_resumed_has_the_same_bits(model, pairs, tmp_path):
    other = copy.deepcopy(model)
    options = {"accelerate": "replayed", "save_strategy": "steps", "save_steps": 8, "max_steps": 16}
    whole = trained(model, pairs, tmp_path, **options)
    rest = trained(other, pairs, tmp_path, resume=str(tmp_path / "checkpoint-8"), **options)
    assert rest.values == whole.values[8:]
    assert torch.equal(table_of(other), table_of(model))


def test_a_checkpoint_of_the_library_is_resumed(model, pairs, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 8, "max_steps": 16}
    other = copy.deepcopy(model)
    theirs = trained(model, pairs, tmp_path, **options)
    rest = trained(
        other, pairs, tmp_path, accelerate="replayed", resume=str(tmp_path / "checkpoint-8"), **options
    )
    assert relative(torch.tensor(rest.values), torch.tensor(theirs.values[8:])) < 1e-6


def batches_of(trainer):
    """All batches of an epoch: what the collator makes of the rows that the sampler names."""
    return [*trainer.get_train_dataloader()]


@pytest.mark.parametrize("sampler", ["batch_sampler", "no_duplicates"])
@pytest.mark.parametrize("prompts", [None, "w9 ", {"positive": "w8 w7 "}], ids=["none", "one", "a column's"])
def test_batches_are_those_of_the_library(model, pairs, tmp_path, sampler, prompts):
    options = {"batch_sampler": sampler, "prompts": prompts}
    labelled = pairs.add_column("label", [*range(len(pairs))])
    theirs = batches_of(trainer_of(copy.deepcopy(model), labelled, tmp_path, **options))
    trainer = trainer_of(model, labelled, tmp_path, accelerate="replayed", **options)
    assert not any(isinstance(value, str) for value in trainer.train_dataset[0].values())
    found = batches_of(trainer)
    assert len(found) == len(theirs)
    for ours_, theirs_ in zip(found, theirs, strict=True):
        assert ours_.keys() == theirs_.keys()
        assert all(torch.equal(ours_[name], theirs_[name]) for name in theirs_ if name != "return_loss")


def test_data_sets_of_other_kinds_are_read_as_before(model, pairs, tmp_path):
    """Those of an evaluation too, whose texts may be others; some are tokenised batch by batch."""
    lowered = pairs.with_transform(lambda rows: {name: [x + " w3" for x in rows[name]] for name in rows})
    sets = {"numbered": pairs.select([*range(40, 72)]), "changed": lowered.select([*range(32)])}
    theirs = trainer_of(copy.deepcopy(model), pairs.to_iterable_dataset(), tmp_path, eval_dataset=sets)
    found = trainer_of(model, pairs.to_iterable_dataset(), tmp_path, eval_dataset=sets, accelerate="replayed")
    wanted, losses_ = theirs.evaluate(), found.evaluate()
    for name in ("eval_numbered_loss", "eval_changed_loss"):
        assert losses_[name] == pytest.approx(wanted[name], rel=1e-6)
    assert found.eval_dataset["changed"] is sets["changed"]
    assert found.evaluate(sets["numbered"])["eval_loss"] == pytest.approx(wanted["eval_numbered_loss"])


def test_the_module_is_the_library_s(tokenizer):
    torch.manual_seed(3)
    theirs = library.StaticEmbedding(tokenizer, embedding_dim=D)
    texts = ["w1 w2 w2", "", "w9 unknown"]
    for sparse in (True, False):
        torch.manual_seed(3)
        module = StaticEmbedding(tokenizer, embedding_dim=D, sparse=sparse)
        assert torch.equal(module.embedding.weight, theirs.embedding.weight)
        vectors = []
        for each in (module, theirs):
            each.zero_grad()
            vectors.append(each(each.preprocess(texts, prompt="w4 "))["sentence_embedding"])
            vectors[-1].square().sum().backward()
        assert relative(*vectors) < FLOAT32
        assert module.embedding.weight.grad.is_sparse == sparse
        assert relative(module.embedding.weight.grad.to_dense(), theirs.embedding.weight.grad) < FLOAT32


def test_it_refuses(model, pairs, tmp_path):
    for wrong in (model, None):
        with pytest.raises(TypeError, match="trainer: want a SentenceTransformerTrainer, got"):
            accelerate_static(wrong)
    with pytest.raises(ValueError, match="rows: want"):
        trainer_of(model, pairs, tmp_path, accelerate="some")
    with pytest.raises(ValueError, match="want optim adamw_torch or adamw_torch_fused, got"):
        trainer_of(model, pairs, tmp_path, accelerate="all", optim="sgd")
    trainer = trainer_of(model, pairs, tmp_path)
    trainer.train_dataset = datasets.Dataset.from_dict({"anchor": ["a", "b"], "positive": ["a", None]})
    with pytest.raises(ValueError, match="got 1 None in column 'positive'"):
        accelerate_static(trainer)
    trainer = trainer_of(model, pairs, tmp_path)
    trainer.create_optimizer()
    with pytest.raises(ValueError, match="want one without an optimizer of its own"):
        accelerate_static(trainer)
    trainer = trainer_of(model, pairs, tmp_path)
    trainer.data_collator = list
    with pytest.raises(TypeError, match="want the library's data collator, got type"):
        accelerate_static(trainer)
    bow = SentenceTransformer(modules=[library.BoW(["a"])], device="cpu")
    with pytest.raises(ValueError, match="want a model with a StaticEmbedding"):
        trainer_of(bow, pairs, tmp_path, accelerate="all", loss=losses.MultipleNegativesRankingLoss(bow))

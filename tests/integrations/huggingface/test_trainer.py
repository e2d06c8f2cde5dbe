"""A ContrastiveModel in `transformers.Trainer` against a loop by hand in plain torch."""

import math

import pytest
import torch
from torch.nn import functional as F

import fastqt
from fastqt.nn import SimCSELoss

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
pytest.importorskip("accelerate", reason="the extra hf is not installed")

# These import the library, after the skips.
from fastqt.integrations.huggingface import (  # noqa: E402
    ContrastiveCollator,
    ContrastiveModel,
    HuggingFaceEncoder,
    without_scale_decay,
)
from tests.shared.huggingface_on_ranks import BATCH, InOrder, trained, trained_on_ranks  # noqa: E402
from tests.shared.ranks import Ranks  # noqa: E402

# accelerate and torch's optimisers warn of their own calls.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]

ROWS = [
    {"anchor": "the cat sat.", "positive": "a cat", "negative": "on a mat"},
    {"anchor": "a mat.", "positive": "the mat the mat", "negative": "sat on"},
    {"anchor": "the mats sat on a cat.", "positive": "mats sat", "negative": "the cat sat on a mat."},
    {"anchor": "cats", "positive": "a cat sat on the cat", "negative": "mat"},
    {"anchor": "on", "positive": "on the", "negative": "cats sat"},
    {"anchor": "sat on a mat", "positive": "sat on mats.", "negative": "the"},
]
COLUMNS = {1: ("anchor",), 2: ("anchor", "positive"), 3: ("anchor", "positive", "negative")}


def rows(columns: int):
    return [{name: row[name] for name in COLUMNS[columns]} for row in ROWS]


def trainer(model, folder, data, **arguments):
    """A Trainer whose dropout depends on the step alone."""
    seeds = iter(range(10**6))
    model.register_forward_pre_hook(lambda *_: torch.manual_seed(next(seeds)) and None)
    sizes = {"per_device_train_batch_size": 3, "per_device_eval_batch_size": 4, "num_train_epochs": 2}
    log = {"logging_strategy": "steps", "logging_steps": 1}
    return InOrder(model, str(folder), data, **{**sizes, **log, **arguments})


def losses_of(run):
    return [line["loss"] for line in run.state.log_history if "loss" in line]


class ByHand:
    """The same training in plain torch and transformers: its own pooling, loss, optimiser and batches."""

    def __init__(self, folder, columns: int, *, learn_scale: bool = False, lr: float = 0.05) -> None:
        self.model = transformers.AutoModel.from_pretrained(folder).double().train()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.columns, self.steps, self.losses = columns, 0, []
        # The parameter of a fastqt loss starts in float32.
        start = torch.tensor(math.log(20.0), dtype=torch.float32 if learn_scale else torch.float64).double()
        self.log_scale = torch.nn.Parameter(start, requires_grad=learn_scale)
        parameters = [*self.model.parameters(), *([self.log_scale] if learn_scale else [])]
        self.optimizer = torch.optim.SGD(parameters, lr=lr)

    def vectors(self, texts):
        return self.model(**self.tokenizer(texts, padding=True, return_tensors="pt")).pooler_output

    def loss(self, batch):
        torch.manual_seed(self.steps)
        self.steps += 1
        columns = [[row[name] for row in batch] for name in COLUMNS[self.columns]]
        if len(columns) == 1:
            vectors = self.vectors(columns[0] * 2)
            z = [vectors[: len(batch)], vectors[len(batch) :]]
        else:
            z = [self.vectors(texts) for texts in columns]
        queries, candidates = F.normalize(z[0], dim=1), F.normalize(torch.cat(z[1:]), dim=1)
        scores = self.log_scale.exp() * queries @ candidates.T
        return F.cross_entropy(scores, torch.arange(len(batch)))

    def run(self, data, *, batch_size: int, accumulated: int = 1, epochs: int = 2):
        for _ in range(epochs):
            batches = [data[i : i + batch_size] for i in range(0, len(data), batch_size)]
            for begin in range(0, len(batches), accumulated):
                window = batches[begin : begin + accumulated]
                self.optimizer.zero_grad()
                losses = [self.loss(batch) / len(window) for batch in window]
                sum(losses).backward()
                self.optimizer.step()
                self.losses.append(sum(losses).item())
        return self


def assert_same(model: ContrastiveModel, by_hand: ByHand, run) -> None:
    # The Trainer rounds what it logs to 4 or more digits.
    assert losses_of(run) == pytest.approx(by_hand.losses, rel=1e-4)
    found, wanted = dict(model.encoder.model.named_parameters()), dict(by_hand.model.named_parameters())
    assert found.keys() == wanted.keys()
    moved = 0.0
    for name, tensor in wanted.items():
        assert (found[name] - tensor).abs().max() <= 1e-10, name
    for name, tensor in transformers.AutoModel.from_pretrained(model.name_or_path).named_parameters():
        moved += (found[name] - tensor).abs().sum().item()
    assert moved > 0.1  # there is something to compare


QUICK = ("one column", "labels")
# The columns, the arguments of the Trainer, and the batches of a step. 6 rows in batches of 2 make 3 batches:
# where two are accumulated, there is a window of 2, and one of 1.
RUNS = {
    "one column": (1, {}, 1),
    "two columns": (2, {}, 1),
    "three columns": (3, {}, 1),
    "accumulated": (2, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, 2),
    "labels": (2, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}, 3),
    "a learnt scale": (2, {}, 1),
    "a data set of the library": (2, {}, 1),
}
each_run = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in RUNS]


@pytest.mark.parametrize("name", each_run)
def test_a_run_equals_a_loop_by_hand(checkpoint, tmp_path, name):
    columns, arguments, accumulated = RUNS[name]
    learns = name == "a learnt scale"
    model = ContrastiveModel(checkpoint, SimCSELoss(learn_scale=learns)).double()
    data = rows(columns)
    if name == "labels":  # which change nothing
        data = [{**row, "label": number} for number, row in enumerate(data)]
    if name == "a data set of the library":
        data = pytest.importorskip("datasets", reason="datasets is not installed").Dataset.from_list(data)
        with pytest.raises(ValueError, match="remove_unused_columns=False"):
            trainer(ContrastiveModel(checkpoint), tmp_path, data, remove_unused_columns=True).train()
    run = trainer(model, tmp_path, data, **arguments)
    run.train()
    batch_size = arguments.get("per_device_train_batch_size", 3)
    by_hand = ByHand(checkpoint, columns, learn_scale=learns)
    by_hand.run(rows(columns), batch_size=batch_size, accumulated=accumulated)
    assert run.state.global_step == len(by_hand.losses)
    if learns:
        assert model.loss.log_scale.item() == pytest.approx(by_hand.log_scale.item(), abs=1e-8)
    assert_same(model, by_hand, run)


def test_a_learnt_scale_is_trained_saved_and_resumed(checkpoint, tmp_path):
    def model():
        return ContrastiveModel(checkpoint, SimCSELoss(learn_scale=True))

    arguments = {"save_strategy": "steps", "save_steps": 3, "optim": "adamw_torch", "learning_rate": 1e-3}
    whole = model()
    run = trainer(whole, tmp_path / "a", rows(2), **arguments)
    run.train()
    scale = whole.loss.log_scale.item()
    assert scale != pytest.approx(math.log(20), abs=1e-4)
    continued = model()
    later = trainer(continued, tmp_path / "b", rows(2), **arguments)
    first = iter(range(3, 10**6))  # the seeds of the steps that are left
    continued._forward_pre_hooks.clear()
    continued.register_forward_pre_hook(lambda *_: torch.manual_seed(next(first)) and None)
    later.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert later.state.global_step == 4
    for name, tensor in whole.state_dict().items():
        assert torch.equal(continued.state_dict()[name], tensor), name
    run.save_model(str(tmp_path / "saved"))
    again = ContrastiveModel.from_pretrained(tmp_path / "saved", loss=SimCSELoss(learn_scale=True))
    assert again.loss.log_scale.item() == scale
    encoder = HuggingFaceEncoder(tmp_path / "saved")
    for name, tensor in whole.encoder.model.state_dict().items():
        assert torch.equal(encoder.model.state_dict()[name], tensor), name
    # A loss without a parameter has no use for the stored one.
    assert ContrastiveModel.from_pretrained(tmp_path / "saved").loss is fastqt.simcse_loss


@pytest.mark.parametrize("columns", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_evaluation_gives_the_loss_without_dropout(checkpoint, tmp_path, columns):
    model = ContrastiveModel(checkpoint).double()
    run = trainer(model, tmp_path, rows(columns))
    found = run.evaluate()["eval_loss"]
    by_hand = ByHand(checkpoint, columns)
    by_hand.model.eval()
    with torch.no_grad():
        losses = [by_hand.loss(rows(columns)[:4]), by_hand.loss(rows(columns)[4:])]
    # The Trainer weights batches by their sizes.
    assert found == pytest.approx((4 * losses[0] + 2 * losses[1]).item() / 6, rel=1e-5)
    predicted = run.predict(rows(columns)).predictions
    assert predicted.shape == (6, max(columns, 2), 8)
    alone = model(**run.data_collator(rows(1)), return_loss=False)
    assert alone.loss is None
    assert alone.embeddings.shape == (6, 1, 8)
    assert torch.allclose(alone.embeddings[:, 0], torch.from_numpy(predicted[:, 0]), atol=1e-6)


def features(checkpoint, columns=3, data=None):
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    return ContrastiveCollator(tokenizer)(data or rows(columns))


@pytest.mark.parametrize("pooling", ["cls", "cls_before_pooler", "mean"])
def test_vectors_are_those_of_the_encoder(checkpoint, pooling):
    model = ContrastiveModel(checkpoint, pooling=pooling).eval()
    output = model(**features(checkpoint, 2))
    wanted = model.encoder.encode([row["positive"] for row in ROWS])
    assert output.embeddings[:, 1].detach().numpy() == pytest.approx(wanted, abs=1e-6)
    output.loss.backward()
    # DDP waits for every parameter that wants a gradient.
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_stacked_columns_are_columns(checkpoint):
    model = ContrastiveModel(checkpoint).eval()
    data = [{**row, "fourth": "the cat"} for row in rows(3)]
    batch = features(checkpoint, data=data)
    assert batch["input_ids"].shape[:2] == batch["attention_mask"].shape[:2] == (6, 4)
    first_three = {name: feature[:, :3] for name, feature in batch.items()}
    found, wanted = model(**first_three), model(**features(checkpoint, 3))
    assert found.embeddings.shape == (6, 3, 8)
    torch.testing.assert_close(found.embeddings, wanted.embeddings)
    torch.testing.assert_close(found.loss, wanted.loss)
    model.train()
    one = {name: feature[:, :1] for name, feature in batch.items()}
    z1, z2 = model(**one).embeddings.unbind(1)  # two views of it
    assert not torch.equal(z1, z2)


def test_a_loss_of_labels_is_given_them(checkpoint):
    given = []

    def loss(embeddings, labels):
        given.append((embeddings, labels))
        return embeddings.square().sum()

    model = ContrastiveModel(checkpoint, loss).train()
    data = [{**row, "label": number % 3} for number, row in enumerate(rows(1))]
    output = model(**features(checkpoint, data=data))
    assert given[0][0].shape == (6, 8)
    assert given[0][1].tolist() == [0, 1, 2, 0, 1, 2]
    assert output.embeddings.shape == (6, 1, 8)
    with pytest.raises(ValueError, match="labels: want those of the batch"):
        model(**features(checkpoint, 1))


@pytest.mark.parametrize("as_module", [False, True])
def test_losses_take_triplets(checkpoint, as_module):
    """As a third argument, among the documents, or as negatives."""
    same = {
        fastqt.simcse_loss: fastqt.nn.SimCSELoss,
        fastqt.multiple_negatives_ranking_loss: fastqt.nn.MultipleNegativesRankingLoss,
        fastqt.info_nce_loss: fastqt.nn.InfoNCELoss,
    }
    losses = []
    for function, module in same.items():
        model = ContrastiveModel(checkpoint, module() if as_module else function).eval()
        losses.append(model(**features(checkpoint)).loss)
    torch.testing.assert_close(losses, [losses[0]] * 3)


@pytest.mark.slow
def test_other_libraries_load_what_is_saved(checkpoint, tmp_path):
    library = pytest.importorskip("sentence_transformers", reason="the extra st is not installed")
    model = ContrastiveModel(checkpoint, SimCSELoss(learn_scale=True), pooling="mean").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.save_pretrained(tmp_path / "saved")
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "saved")
    assert type(loaded) is type(model.encoder.model)
    texts = [row["anchor"] for row in ROWS]
    wanted = model.encoder.encode(texts)
    theirs = library.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    for encoder in (HuggingFaceEncoder(tmp_path / "saved", pooling="mean"), theirs):
        assert encoder.encode(texts) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"loss": fastqt.clip_loss, "mix": 1.0}, TypeError, "mix: no option of clip_loss"),
        ({"loss": SimCSELoss(), "scale": 1.0}, TypeError, "scale: want it when SimCSELoss is made"),
        ({"reduction": "none"}, ValueError, "reduction: want one that gives a scalar"),
        ({"loss": SimCSELoss(reduction="none")}, ValueError, "reduction: want one that gives a scalar"),
    ],
    ids=["option", "module and option", "reduction", "module"],
)
def test_wrong_arguments_are_refused(checkpoint, arguments, error, message):
    with pytest.raises(error, match=message):
        ContrastiveModel(checkpoint, **arguments)


def test_wrong_batches_are_refused(checkpoint):
    model = ContrastiveModel(checkpoint)
    batch = features(checkpoint, 2)
    with pytest.raises(TypeError, match="scores: no argument of ContrastiveModel"):
        model(**batch, scores=batch["input_ids"])
    with pytest.raises(ValueError, match=r"input_ids: want \(B, L\) where positive_input_ids is given"):
        model(**{**batch, "input_ids": batch["input_ids"][:, None]})
    with pytest.raises(ValueError, match=r"loss: want one that returns a scalar, got shape \(6,\)"):
        ContrastiveModel(checkpoint, lambda z1, z2: (z1 * z2).sum(1))(**batch)
    with pytest.raises(TypeError, match="pooling: want it when the HuggingFaceEncoder is made"):
        ContrastiveModel(model.encoder, pooling="mean")


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_scales_are_left_out_of_weight_decay(checkpoint, tmp_path, optim):
    """The parameters of the two groups are those of the Trainer, but for the scale; a bias never decays."""
    model = ContrastiveModel(checkpoint, fastqt.nn.SigLIPLoss())
    made = [trainer(model, tmp_path, rows(2), weight_decay=0.1, optim=optim) for _ in range(2)]
    made[1] = without_scale_decay(made[1])
    plain, ours = (decayed(model, one.create_optimizer()) for one in made)
    assert plain - ours == {"loss.log_scale"}
    assert ours < plain
    with pytest.raises(ValueError, match="trainer: want one that has no optimizer yet"):
        without_scale_decay(made[1])
    with pytest.raises(TypeError, match="trainer: want a Trainer of transformers, got Linear"):
        without_scale_decay(torch.nn.Linear(1, 1))


def test_scales_are_left_out_of_weight_decay_in_sentence_transformers(checkpoint, tmp_path):
    library = pytest.importorskip("sentence_transformers", reason="the extra st is not installed")

    class Loss(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.loss = model, fastqt.nn.InfoNCELoss(learn_scale=True)

        def forward(self, features, labels=None):
            return self.loss(*(self.model(x)["sentence_embedding"] for x in features))

    datasets = pytest.importorskip("datasets", reason="the extra st is not installed")
    model = library.SentenceTransformer(str(checkpoint), device="cpu")
    pairs = datasets.Dataset.from_list(rows(2))
    arguments = library.SentenceTransformerTrainingArguments(
        str(tmp_path), weight_decay=0.5, learning_rate=0.1, use_cpu=True, report_to=[], max_steps=1
    )
    of_loss = []
    for wrap in (lambda x: x, without_scale_decay):
        loss = Loss(model)
        one = wrap(library.SentenceTransformerTrainer(model, arguments, pairs, loss=loss))
        of_loss.append(decayed(loss, one.create_optimizer()))
    assert of_loss[0] - of_loss[1] == {"loss.log_scale"}
    assert of_loss[1] < of_loss[0]


def decayed(model, optimizer) -> set[str]:
    """The names of the parameters with weight decay."""
    places = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    return {name for name, p in model.named_parameters() if id(p) in places}


@pytest.mark.slow  # transformers is imported in each process
@pytest.mark.parametrize(
    "arguments",
    [{}, {"gradient_checkpointing": True}],
    ids=["plain", "gradient_checkpointing"],
)
def test_a_run_on_two_ranks_has_their_rows_in_one_batch(checkpoint, tmp_path, arguments):
    ranks = Ranks(2)
    try:
        found = ranks.run(trained_on_ranks, str(checkpoint), str(tmp_path), arguments)
    finally:
        ranks.close()
    wanted = trained(str(checkpoint), str(tmp_path), 2 * BATCH)
    for rank in found:
        assert rank.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(rank[name], tensor, rtol=1e-6, atol=1e-9, msg=name)

"""The batches of a collator: columns of text or of tokens, padded, and refusals by row and column."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
pytest.importorskip("accelerate", reason="the extra hf is not installed")

# These import the library, after the skips.
from fastqt.integrations.huggingface import (  # noqa: E402
    ContrastiveCollator,
)

# accelerate and torch's optimisers warn of their own calls.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]

PAIRS = [
    {"id": 7, "query": "the cat sat.", "answer": "a mat", "label": 0},
    {"id": 8, "query": "a", "answer": "the mats sat on a cat.", "label": 2},
]


@pytest.fixture
def tokenizer(checkpoint):
    return transformers.AutoTokenizer.from_pretrained(checkpoint)


def same(found, wanted):
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_columns_of_text_in_their_order(tokenizer):
    batch = ContrastiveCollator(tokenizer)(PAIRS)
    wanted = dict(tokenizer(["the cat sat.", "a"], padding=True, return_tensors="pt"))
    answers = tokenizer(["a mat", "the mats sat on a cat."], padding=True, return_tensors="pt")
    wanted |= {f"positive_{name}": tensor for name, tensor in answers.items()}
    same(batch, {**wanted, "labels": torch.tensor([0, 2])})
    swapped = ContrastiveCollator(tokenizer, ("answer", "query"))(PAIRS)
    assert torch.equal(swapped["input_ids"], batch["positive_input_ids"])
    assert torch.equal(swapped["positive_input_ids"], batch["input_ids"])
    alone = ContrastiveCollator(tokenizer, ["query"], max_length=3)(PAIRS)
    assert alone.keys() == {"input_ids", "attention_mask", "token_type_ids", "labels"}
    assert alone["attention_mask"].sum(1).tolist() == [3, 3]


def test_columns_that_are_tokenised(tokenizer):
    rows = [
        {
            **tokenizer(row["query"]),
            **{f"positive_{name}": ids for name, ids in tokenizer(row["answer"]).items()},
            "label": row["label"],
        }
        for row in PAIRS
    ]
    same(ContrastiveCollator(tokenizer)(rows), ContrastiveCollator(tokenizer)(PAIRS))


def test_padding_is_on_the_right(tokenizer):
    tokenizer.padding_side = "left"
    assert ContrastiveCollator(tokenizer)(PAIRS)["attention_mask"][1].tolist() == [1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("columns", "message"),
    [((), "columns: want the names"), ("query", "columns: want the names"), (("a", "a"), "want distinct")],
)
def test_wrong_columns_are_refused(tokenizer, columns, message):
    with pytest.raises(ValueError, match=message):
        ContrastiveCollator(tokenizer, columns)


def test_rows_without_text_are_refused(tokenizer):
    with pytest.raises(ValueError, match="columns: want question, got id, query, answer, label"):
        ContrastiveCollator(tokenizer, ["question"])(PAIRS)
    with pytest.raises(ValueError, match=r"columns: want columns of text, got label; .*remove_unused"):
        ContrastiveCollator(tokenizer)([{"label": 3}])


TWO = {"anchor": "the cat sat.", "positive": "the cat"}
IDS = {"input_ids": [2, 5, 3], "positive_input_ids": [2, 6, 3]}


TEXT, LABEL, TOKENS = (f"want a {what} in every row, " for what in ("text", "label", "list of tokens"))


@pytest.mark.parametrize(
    ("rows", "column", "want", "got"),
    [
        # A text is missing: in the first row, in a later one, in all of a batch.
        ([{**TWO, "anchor": None}, TWO], "anchor", TEXT, "got None in row 0"),
        ([{**TWO, "anchor": float("nan")}], "anchor", TEXT, "got nan in row 0"),
        # Rows have different columns.
        ([{"positive": "the cat"}, TWO], "anchor", TEXT, "got no such column in row 0"),
        ([TWO, {**TWO, "negative": "a mat"}], "negative", TEXT, "got no such column in row 0"),
        # Something else than a text.
        ([{**TWO, "anchor": 5}, TWO], "anchor", TEXT, "got 5 in row 0"),
        ([{**TWO, "negatives": ["a", "b"]}], "negatives", TEXT, ".*several negatives has a column"),
        ([{**TWO, "negatives": []}, {**TWO, "negatives": ["a"]}], "negatives", TEXT, r"got \[\] in row 0"),
        # Labels.
        ([{**TWO, "label": None}, {**TWO, "label": 1}], "label", LABEL, "got None in row 0"),
        ([TWO, {**TWO, "label": 1}], "label", LABEL, "got no such column in row 0"),
        ([{**TWO, "label": "cats"}], "label", LABEL, "got 'cats' in row 0"),
        ([{**TWO, "labels": [1]}, {**TWO, "labels": [1, 2]}], "labels", "want labels of one shape", ""),
        # Columns that are tokenised.
        ([{**IDS, "input_ids": None}, IDS], "input_ids", TOKENS, "got None in row 0"),
        ([IDS, {**IDS, "input_ids": []}], "input_ids", TOKENS, r"got \[\] in row 1"),
        ([TWO, IDS], "input_ids", TOKENS, "got no such column in row 0"),
        ([], "rows", "want at least one", ""),
    ],
    ids=range(15),
)
def test_what_a_row_lacks_is_named(tokenizer, rows, column, want, got):
    with pytest.raises(ValueError, match=f"^{column}: {want}{got}"):
        ContrastiveCollator(tokenizer)(rows)


def test_only_named_columns_have_to_hold_text(tokenizer):
    rows = [{**TWO, "title": None, "label": "cats"}, {**TWO, "title": "a", "label": "cats"}]
    same(
        ContrastiveCollator(tokenizer, ["anchor", "label"])(rows),
        ContrastiveCollator(tokenizer)([{"anchor": TWO["anchor"], "positive": "cats"}] * 2),
    )


def test_an_empty_text_is_its_special_tokens_and_refused_if_it_has_none(tokenizer):
    rows = [{"anchor": "", "positive": "a"}, TWO]
    collate = ContrastiveCollator(tokenizer)
    assert collate(rows)["attention_mask"].sum(1).tolist() == [2, 6]
    tokenizer.backend_tokenizer.post_processor = None
    with pytest.raises(ValueError, match=r"^anchor: want a text with a token .*, got '' in row 0"):
        collate(rows)

"""Batches that ContrastiveCollator makes, against those of the tokenizer alone."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

from fastqt.integrations.huggingface import ContrastiveCollator  # noqa: E402  # after the skip

ROWS = [
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
    batch = ContrastiveCollator(tokenizer)(ROWS)
    wanted = dict(tokenizer(["the cat sat.", "a"], padding=True, return_tensors="pt"))
    answers = tokenizer(["a mat", "the mats sat on a cat."], padding=True, return_tensors="pt")
    wanted |= {f"positive_{name}": tensor for name, tensor in answers.items()}
    same(batch, {**wanted, "labels": torch.tensor([0, 2])})
    swapped = ContrastiveCollator(tokenizer, ("answer", "query"))(ROWS)
    assert torch.equal(swapped["input_ids"], batch["positive_input_ids"])
    assert torch.equal(swapped["positive_input_ids"], batch["input_ids"])
    alone = ContrastiveCollator(tokenizer, ["query"], max_length=3)(ROWS)
    assert alone.keys() == {"input_ids", "attention_mask", "token_type_ids", "labels"}
    assert alone["attention_mask"].sum(1).tolist() == [3, 3]


def test_columns_that_are_tokenised(tokenizer):
    rows = [
        {
            **tokenizer(row["query"]),
            **{f"positive_{name}": ids for name, ids in tokenizer(row["answer"]).items()},
            "label": row["label"],
        }
        for row in ROWS
    ]
    same(ContrastiveCollator(tokenizer)(rows), ContrastiveCollator(tokenizer)(ROWS))


def test_padding_is_on_the_right(tokenizer):
    tokenizer.padding_side = "left"
    assert ContrastiveCollator(tokenizer)(ROWS)["attention_mask"][1].tolist() == [1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("columns", "message"),
    [((), "columns: want the names"), ("query", "columns: want the names"), (("a", "a"), "want distinct")],
)
def test_wrong_columns_are_refused(tokenizer, columns, message):
    with pytest.raises(ValueError, match=message):
        ContrastiveCollator(tokenizer, columns)


def test_rows_without_text_are_refused(tokenizer):
    with pytest.raises(ValueError, match="columns: want question, got id, query, answer, label"):
        ContrastiveCollator(tokenizer, ["question"])(ROWS)
    with pytest.raises(
        ValueError, match=r"columns: want columns of text, got label; .*remove_unused_columns"
    ):
        ContrastiveCollator(tokenizer)([{"label": 3}])
    with pytest.raises(ValueError, match="answer: want a text in every row, got None"):
        ContrastiveCollator(tokenizer)([ROWS[0], {**ROWS[1], "answer": None}])

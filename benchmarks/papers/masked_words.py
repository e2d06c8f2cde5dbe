"""A small Transformer that learns to predict masked words, for SimCSE and MixCSE to start from.

python -m benchmarks.papers.masked_words train.txt.xz --valid valid.txt.xz --out DIR

The masks are BERT's: 15 % of the tokens are chosen; of these 80 % become [MASK], 10 % a random token, and
10 % stay. The layers are ModernBERT's, with rotary positions and the normalisation before each block: a BERT
of this size predicts words by their frequency alone for far longer. There is no dropout, as nearly every
piece of text is seen once; the checkpoint has some, by which the views of SimCSE differ. The text is cut into
pieces of equal length, which cross the ends of sentences. DIR becomes a checkpoint that `fastqt train
--encoder huggingface --checkpoint DIR` takes. A run that was stopped goes on where its last checkpoint was
written. The settings and figures are stored, not the weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import BertWordPieceTokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import BertTokenizerFast, ModernBertConfig, ModernBertForMaskedLM

from benchmarks.measure.machine import processor_and_versions
from benchmarks.paths import RESULTS
from fastqt.sentences.runs.files import write_atomically
from fastqt.sentences.text.reader import read_blocks

STORED = RESULTS / "papers" / "masked-words.json"
V, LENGTH, BATCH = 12_000, 64, 64  # word pieces; tokens of a piece of text; pieces of a batch
WIDTH, LAYERS, HEADS = 128, 4, 4
RATE, WARM_UP, DECAY, CLIP = 2e-3, 200, 0.01, 1.0
DROPOUT = 0.1  # of the checkpoint
CHOSEN, MASKED, REPLACED = 0.15, 0.8, 0.1  # shares of tokens, and of the chosen ones
VALID_BATCHES = 32
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNKNOWN, CLS, SEP, MASK = range(len(SPECIAL))
ADAM = {"lr": RATE, "betas": (0.9, 0.98), "weight_decay": DECAY}


class Masked(NamedTuple):
    """A batch of masked pieces of text."""

    tokens: Tensor  # (B, L) int64, what the model sees
    chosen: Tensor  # (B, L) bool, the tokens to predict
    wanted: Tensor  # (n,) int64, what they were


def sentences(files: Sequence[str]) -> Iterator[str]:
    for block in read_blocks(files):
        yield from block.sentences


def make_tokenizer(files: Sequence[str], out: Path) -> BertTokenizerFast:
    """Word pieces of the text, in lower case; read from `out` if they were made before."""
    if not (out / "tokenizer.json").exists():
        pieces = BertWordPieceTokenizer(lowercase=True)
        pieces.train_from_iterator(sentences(files), vocab_size=V, special_tokens=list(SPECIAL))
        made = BertTokenizerFast(tokenizer_object=pieces._tokenizer, model_max_length=128)
        made.save_pretrained(out)
    return BertTokenizerFast.from_pretrained(out)


def token_ids(files: Sequence[str], tokenizer: BertTokenizerFast) -> NDArray[np.uint16]:
    """The text as one row of token ids, without special tokens."""
    parts = []
    for block in read_blocks(files):
        for ids in tokenizer(block.sentences, add_special_tokens=False)["input_ids"]:
            parts.append(np.array(ids, dtype=np.uint16))
    return np.concatenate(parts)


def pieces(ids: NDArray[np.uint16]) -> Tensor:
    """Cuts ids into rows (n, LENGTH) int64 that begin with [CLS] and end with [SEP]."""
    inner = LENGTH - 2
    rows = torch.from_numpy(ids[: len(ids) // inner * inner].astype(np.int64)).view(-1, inner)
    ends = rows.new_tensor([CLS, SEP]).expand(len(rows), 2)
    return torch.cat([ends[:, :1], rows, ends[:, 1:]], dim=1)


def masked(tokens: Tensor, seed: int) -> Masked:
    """Chooses tokens to predict. The same seed gives the same choice."""
    generator = torch.Generator().manual_seed(seed)
    chance = torch.rand(tokens.shape, generator=generator)
    chosen = (chance < CHOSEN) & (tokens >= len(SPECIAL))
    seen, fate = tokens.clone(), chance / CHOSEN  # of the chosen ones uniform in 0..1
    seen[chosen & (fate < MASKED)] = MASK
    random = chosen & (fate >= 1 - REPLACED)
    seen[random] = torch.randint(len(SPECIAL), V, (int(random.sum()),), generator=generator)
    return Masked(seen, chosen, tokens[chosen])


def predicted(model: ModernBertForMaskedLM, batch: Masked) -> Tensor:
    """The logits (n, V) of the chosen tokens; no others are computed."""
    states = model.model(input_ids=batch.tokens).last_hidden_state
    logits: Tensor = model.decoder(model.head(states[batch.chosen]))
    return logits


def rate(step: int, steps: int) -> float:
    """The factor of the learning rate: a linear rise, then a linear fall to 0."""
    return min(step / WARM_UP, (steps - step) / max(steps - WARM_UP, 1))


@torch.no_grad()
def validate(model: ModernBertForMaskedLM, rows: Tensor) -> dict[str, float]:
    """The cross-entropy in nats and the accuracy over the held-out text, always with the same masks."""
    model.eval()
    nats = hits = words = 0.0
    for number, tokens in enumerate(rows.split(BATCH)[:VALID_BATCHES]):
        batch = masked(tokens, seed=number)
        logits = predicted(model, batch)
        nats += F.cross_entropy(logits, batch.wanted, reduction="sum").item()
        hits += (logits.argmax(dim=1) == batch.wanted).sum().item()
        words += len(batch.wanted)
    model.train()
    return {"validation_loss": nats / words, "validation_accuracy": hits / words}


def train(files: Sequence[str], valid: str, out: Path, steps: int, report_every: int, seed: int = 0) -> None:
    """Trains, or goes on with a training, until `steps` batches have been seen."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(files, out)

    text = out / "tokens.uint16"
    if not text.exists():
        write_atomically(text, lambda path: token_ids(files, tokenizer).tofile(path))
    rows, held_out = pieces(np.fromfile(text, dtype=np.uint16)), pieces(token_ids([valid], tokenizer))

    torch.manual_seed(seed)
    model = ModernBertForMaskedLM(
        ModernBertConfig(
            vocab_size=V,
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=2 * WIDTH,
            max_position_embeddings=128,
            global_attn_every_n_layers=1,
            pad_token_id=PAD,
            bos_token_id=CLS,
            cls_token_id=CLS,
            eos_token_id=SEP,
            sep_token_id=SEP,
        )
    )

    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    state: dict[str, Any] = {"step": 0, "cpu_seconds": 0.0, "log": []}

    checkpoint = out / "checkpoint.pt"
    if checkpoint.exists():
        stored = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(stored.pop("model"))
        optimizer.load_state_dict(stored.pop("optimizer"))
        torch.set_rng_state(stored.pop("generator"))
        state = stored

    began = time.process_time() - state["cpu_seconds"]
    losses: list[float] = []
    model.train()
    while state["step"] < steps:
        epoch, first = divmod(state["step"] * BATCH, len(rows) // BATCH * BATCH)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed + epoch))
        batch = masked(rows[order[first : first + BATCH]], seed=(seed << 32) + state["step"])
        for group in optimizer.param_groups:
            group["lr"] = RATE * rate(state["step"] + 1, steps)

        loss = F.cross_entropy(predicted(model, batch), batch.wanted)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

        losses.append(loss.item())
        state["step"] += 1

        if state["step"] % report_every == 0 or state["step"] == steps:
            figures = {"step": state["step"], "loss": sum(losses) / len(losses), **validate(model, held_out)}
            state["cpu_seconds"] = figures["cpu_seconds"] = time.process_time() - began
            losses.clear()
            state["log"].append(figures)
            print(json.dumps(figures), flush=True)

            whole = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "generator": torch.get_rng_state(),
                **state,
            }
            write_atomically(checkpoint, lambda path, whole=whole: torch.save(whole, path))

    for place in ("embedding", "attention", "mlp"):
        setattr(model.config, f"{place}_dropout", DROPOUT)
    model.model.save_pretrained(out)
    store(files, out, state, steps, seed)


def store(files: Sequence[str], out: Path, state: dict[str, Any], steps: int, seed: int) -> None:
    """Writes the settings, the figures and the digest of the weights."""
    record = {
        "machine": processor_and_versions(),
        "settings": {
            "files": [Path(file).name for file in files],
            "steps": steps,
            "seed": seed,
            "vocabulary": V,
            "length": LENGTH,
            "batch": BATCH,
            "width": WIDTH,
            "layers": LAYERS,
            "heads": HEADS,
            "warm_up": WARM_UP,
            "adam": ADAM,
            "layer": "ModernBERT's",
        },
        "sha256": hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest(),
        "log": state["log"],
    }

    STORED.parent.mkdir(parents=True, exist_ok=True)
    STORED.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="CORPUS", help="text, a sentence a line")
    parser.add_argument("--valid", required=True, metavar="FILE", help="held-out text")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="directory of the checkpoint")
    parser.add_argument("--steps", type=int, default=3000, metavar="N", help="batches (default: 3000)")
    parser.add_argument("--report-every", type=int, default=250, metavar="N")
    arguments = parser.parse_args()
    train(arguments.files, arguments.valid, arguments.out, arguments.steps, arguments.report_every)


if __name__ == "__main__":
    main()

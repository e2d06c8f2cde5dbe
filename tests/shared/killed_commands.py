"""Commands that are killed at random moments, and what is left of the files that were there before.

python -m tests.shared.killed_commands 60     # so many kills, in turns; prints a table

The moments are uniform over the time that the command takes, from before it does anything to after its end.
`serve` runs in a process of its own, which imports everything once, and forks a process for each command.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
BEYOND = 1.1  # the latest moment of a kill, in times of what a whole command takes
# Each command in the folder of its files, and what of them it replaces.
COMMANDS = {
    "train": ("train --out run --resume --steps 40", "run"),
    "index": ("index run new.txt --out c.index", "c.index"),
    "export": ("export run --format sentence-transformers --out out --overwrite", "out"),
    "mine": ("mine run pairs.tsv --corpus new.txt --out n.tsv", "n.tsv"),
}
SMALL = (
    "--word-dim 50 --batch-size 100 --context-size 1 --report-every 4 --checkpoint-every 2 --keep-checkpoint"
)


def serve() -> None:
    """Runs the command of each line of standard input in a process of its own; prints its number and status.

    This process has one thread only, because other threads would not survive the fork.
    """
    import sentence_transformers  # noqa: F401  # imported once, for all processes
    import torch

    import fastqt.sentences.inference.export
    import fastqt.sentences.inference.index
    import fastqt.sentences.inference.mine
    import fastqt.sentences.train  # noqa: F401  # as the former
    from fastqt.sentences.cli import main

    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        words = json.loads(line)
        pid = os.fork()
        if pid == 0:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            os._exit(main(words))
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)


class Server:
    """The process that `serve` runs in, in a folder."""

    def __init__(self, folder: Path) -> None:
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = str(ROOT)
        command = [sys.executable, "-m", "tests.shared.killed_commands", "serve"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)
        assert self.process.stdout.readline().strip() == "ready"

    def run(self, line: str, kill_after: float | None = None) -> tuple[float, bool]:
        """Runs a command, or kills it after so many seconds; how long it took, and whether it was killed."""
        began = time.perf_counter()
        print(json.dumps(line.split()), file=self.process.stdin, flush=True)
        pid = int(self.process.stdout.readline())
        if kill_after is not None:
            time.sleep(kill_after)
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(pid, signal.SIGKILL)
        status = int(self.process.stdout.readline())
        assert status in (0, signal.SIGKILL), (line, status)
        assert kill_after is not None or status == 0, line
        return time.perf_counter() - began, status != 0

    def close(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def contents(path: Path) -> dict[str, str]:
    """The digest of a file, or of each file in a folder."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return {str(each.relative_to(path)): hashlib.sha256(each.read_bytes()).hexdigest() for each in files}


def write_files(folder: Path, server: Server) -> None:
    """A run with a checkpoint, and what the other commands have written before from another text."""
    draw = random.Random(0)
    words = [f"word{number}" for number in range(80)]
    for name, lines in (("old", 300), ("new", 800)):
        text = "\n".join(" ".join(draw.choices(words, k=6)) for _ in range(lines))
        (folder / f"{name}.txt").write_text(text)
    rows = (
        " ".join(draw.choices(words, k=4)) + "\t" + " ".join(draw.choices(words, k=4)) for _ in range(200)
    )
    (folder / "pairs.tsv").write_text("\n".join(rows))
    server.run(f"train new.txt --out run {SMALL} --epochs 1000 --steps 4")
    server.run("index run old.txt --out c.index")
    server.run("export run --format sentence-transformers --out out --raw")
    server.run("mine run pairs.tsv --out n.tsv")


def outcome_of(name: str, path: Path, before: dict[str, str], after: dict[str, str], server: Server) -> str:
    """Whether the old files are there or the new ones; "lost" if neither are whole."""
    if name != "train":
        now = contents(path)
        return "old" if now == before else "new" if now == after else "lost"

    from fastqt.errors import InputError
    from fastqt.sentences.inference.encoder import SentenceEncoder
    from fastqt.sentences.runs.checkpoint import read_progress

    try:
        SentenceEncoder.load(path, "cpu")
        step = read_progress(path / "checkpoint.safetensors").step
    except InputError:
        return "lost"
    # It goes on to what a training that nobody has killed ends with.
    server.run(COMMANDS[name][0])
    if contents(path)["model.safetensors"] != after["model.safetensors"]:
        return "lost"
    return "old" if step == 4 else "new" if step == 40 else "between"


def killed(kills: int, seed: int = 0) -> dict[str, Counter[str]]:
    """What is left by so many kills, of each command in turns; "in time" are those before its end."""
    draw, outcomes = random.Random(seed), {name: Counter[str]() for name in COMMANDS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "work")
        folder.mkdir()
        server = Server(folder)
        try:
            write_files(folder, server)
            kept = {}
            for command, (line, target) in COMMANDS.items():
                before = shutil.copytree(folder, Path(name, command))
                seconds, _ = server.run(line)
                kept[command] = before, seconds, contents(before / target), contents(folder / target)
            for number in range(kills):
                command = [*COMMANDS][number % len(COMMANDS)]
                before, seconds, old, new = kept[command]
                line, target = COMMANDS[command]
                shutil.rmtree(folder / target) if target in ("run", "out") else (folder / target).unlink()
                copy = shutil.copytree if target in ("run", "out") else shutil.copy
                copy(before / target, folder / target)
                if command != "train":  # the model of a later step would write other vectors
                    shutil.rmtree(folder / "run")
                    shutil.copytree(before / "run", folder / "run")
                _, in_time = server.run(line, kill_after=draw.random() * BEYOND * seconds)
                outcomes[command]["in time"] += in_time
                outcomes[command][outcome_of(command, folder / target, old, new, server)] += 1
        finally:
            server.close()
    return outcomes


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        found = killed(int(sys.argv[1]))
        columns = ("in time", "old", "between", "new", "lost")
        print("command ", *columns)
        for each, times in found.items():
            print(f"{each:8}", *(f"{times[name]:{len(name)}}" for name in columns))
        sys.exit(any(times["lost"] for times in found.values()))

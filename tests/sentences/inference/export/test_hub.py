"""export --push-to-hub: the library of the hub uploads what is written; nothing goes over a network."""

import sys
from pathlib import Path

import pytest

from fastqt.sentences.cli import main
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.train import train

hub = pytest.importorskip("huggingface_hub", reason="the extra hf is not installed")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    (folder / "text.txt").write_text("".join(f"one w{i % 7} two w{i % 5}\n" for i in range(32)))
    settings = {"model": "simcse", "word_dim": 8, "batch_size": 16}
    train(TrainConfig((str(folder / "text.txt"),), **settings), folder / "run")
    return folder / "run"


def exported(run, out):
    words = ["export", str(run), "--format", "sentence-transformers", "--out", str(out)]
    return main([*words, "--push-to-hub", "me/model"])


def test_the_folder_is_uploaded_to_a_private_repository(run, tmp_path, monkeypatch, capsys):
    pytest.importorskip("sentence_transformers", reason="the extra st is not installed")
    calls = []

    def create(repository, **options):
        calls.append(("create", repository, options))
        return f"https://hub.test/{repository}"

    def upload(*, repo_id, folder_path):
        calls.append(("upload", repo_id, sorted(path.name for path in Path(folder_path).iterdir())))

    monkeypatch.setattr(hub, "create_repo", create)
    monkeypatch.setattr(hub, "upload_folder", upload)
    assert exported(run, tmp_path / "out") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "https://hub.test/me/model: uploaded"
    create, upload = calls
    assert create == ("create", "me/model", {"private": True, "exist_ok": True})
    assert upload[:2] == ("upload", "me/model")
    assert {"README.md", "modules.json"} < set(upload[2])


def test_a_hub_that_refuses_is_told_in_one_line(run, tmp_path, monkeypatch, capsys):
    pytest.importorskip("sentence_transformers", reason="the extra st is not installed")

    def refuse(repository, **options):
        raise OSError("401: no token\nlog in first")

    monkeypatch.setattr(hub, "create_repo", refuse)
    assert exported(run, tmp_path / "out") == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("fastqt: push_to_hub: 401: no token")
    assert line.endswith(f"; {tmp_path}/out is written")
    assert (tmp_path / "out" / "modules.json").exists()


def test_without_the_library_nothing_is_written(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert exported(run, tmp_path / "out") == 2
    message = "fastqt: push_to_hub: needs huggingface_hub: pip install huggingface_hub\n"
    assert capsys.readouterr().err == message
    assert not (tmp_path / "out").exists()

"""Uploads an export to the Hugging Face hub, by its library, which knows the user's token."""

from __future__ import annotations

from typing import Any

from fastqt.errors import InputError, one_line


def check_hub() -> Any:
    """The library of the hub; InputError without it, before any work."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise InputError("push_to_hub: needs huggingface_hub: pip install huggingface_hub") from error
    return huggingface_hub


def push(folder: str, repository: str) -> str:
    """Uploads a folder to a repository of models, which is made as a private one; returns its address."""
    hub = check_hub()
    try:
        made = hub.create_repo(repository, private=True, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder)
    except (OSError, ValueError) as error:  # what requests and the library's own checks raise
        raise InputError(f"push_to_hub: {one_line(error, 300)}; {folder} is written") from error
    return str(made)

"""The losses of open_clip, where that is installed."""

import importlib.util
from pathlib import Path
from types import ModuleType


def open_clip_losses() -> ModuleType | None:
    """open_clip's module of losses without the package's other imports; None where it is not installed."""
    spec = importlib.util.find_spec("open_clip")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "loss.py"
    file_spec = importlib.util.spec_from_file_location("open_clip_losses", path)
    assert file_spec is not None
    assert file_spec.loader is not None
    module = importlib.util.module_from_spec(file_spec)
    file_spec.loader.exec_module(module)
    return module

"""What the model keeps of a noted launch: sizes, tiles, bytes, and which compiled kernel it is."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import Tensor

from benchmarks.predict.roofline import Stored
from tests.shared.launches import Launch, Operation, Product

Bytes = tuple[int, int]  # of memory, and of the product that the launch before has left
SPECIALISED = "warp_specialized_scores_kernel"  # each of two groups of warps has half of a tile's rows
# They exit at once where no row has to be repaired, and where the upstream gradient is 1.
IDLE = (
    "raise_row_shifts_kernel",
    "row_products_kernel",
    "scale_gradients_kernel",
)


def matrix(operand: Any) -> Tensor:
    """The tensor that a kernel is given, by a pointer or by a descriptor."""
    tensor: Tensor = getattr(operand, "base", operand)
    return tensor


def row_bytes(launch: Launch) -> Bytes:
    """What a row kernel reads and writes, targets' rows from the cache not counted."""
    arguments, programs = launch.arguments, launch.programs
    name = launch.kernel.__name__

    if name in ("row_stats_kernel", "sigmoid_row_stats_kernel"):
        sums = arguments["tile_row_sums"]
        return 4 * sums.numel() + 64 * sums.shape[1], 0

    if name == "loss_rows_kernel":
        out = arguments["gradients"]
        return programs * arguments["width"] * (4 + (0 if out is None else out.element_size())), 0

    if name == "three_block_rows_kernel":
        return programs * arguments["N"] * 4, 0
    if name == "three_block_gradients_kernel":
        written = [arguments[side] for side in ("to_queries", "to_candidates") if arguments[side] is not None]
        return arguments["rows"] * arguments["N"] * (4 + sum(x.element_size() for x in written)), 0

    if name == "copy_rows_kernel":
        matrix, copy = arguments["matrix"], arguments["copy"]
        return (matrix.numel() + copy.numel()) * copy.element_size(), 0
    if name == "bias_gradient_kernel":
        return 16 * arguments["columns"], 0
    if name not in ("row_shifts_kernel", "gradient_kernel"):
        raise ValueError(
            f"kernel: want one whose traffic is known, got {name}; row_bytes in {__name__} has to learn it"
        )

    embeddings = arguments["queries" if name == "row_shifts_kernel" else "embeddings"]
    itemsize, D = embeddings.element_size(), embeddings.shape[1]
    if name == "row_shifts_kernel":
        return 2 * programs * D * itemsize, 0

    product = programs * D * arguments["product"].element_size()
    if arguments["of_columns"]:
        return programs * D * 2 * itemsize, product

    flags = launch.flags
    return programs * D * itemsize * (2 + flags["GRADIENT"] + flags["WEIGHTED"]), product


def kernel_key(launch: Launch) -> str:
    """A compiled kernel's name: its tile, and what chooses its code."""
    flags = [
        f"{name}={value}" if isinstance(value, str) else name for name, value in launch.flags.items() if value
    ]
    sides = ("BLOCK_N", "BLOCK_M", "BLOCK_ROWS", "BLOCK_COLUMNS")
    tile = [launch.constants[name] for name in sides if name in launch.constants]
    size = " × ".join(map(str, tile)) if len(tile) == 2 else ""
    if "queries" in launch.arguments and size and matrix(launch.arguments["queries"]).stride(0) % 16:
        size += " unaligned"
    return " ".join(filter(None, [launch.kernel.__name__.removesuffix("_kernel"), size, *sorted(flags)]))


def stored_event(event: Launch | Product | Operation) -> Stored:
    """What of an event the model reads.

    Raises:
        ValueError: of a kernel that the model does not know; the message names it.
    """
    if isinstance(event, Product):
        return {"kind": "product", **asdict(event)}
    if isinstance(event, Operation):
        return {"kind": "operation", "bytes": event.bytes}
    try:
        return stored_launch(event)
    except (KeyError, AttributeError) as error:
        raise ValueError(
            f"{event.kernel.__name__}: want the arguments that {__name__} reads, "
            f"got {', '.join(event.arguments)}"
        ) from error


def stored_launch(event: Launch) -> Stored:
    """What of a kernel's launch the model reads."""
    repairs = any(event.flags.get(name) for name in ("ONLY_OVERFLOWED", "shift_overflowed"))
    name = event.kernel.__name__
    redo = bool(repairs) or name in IDLE
    stored = {"kernel": kernel_key(event), "redo": redo}
    if name in ("scores_kernel", SPECIALISED):
        return {"kind": "scores", **stored, **tiles_of(event)}
    if redo:
        return {"kind": "rows", **stored}
    moved, product = row_bytes(event)
    return {"kind": "rows", **stored, **chunk_of_cosines(event), "bytes": moved, "product_bytes": product}


def tiles_of(launch: Launch) -> Stored:
    """What the model reads of the scores' kernel."""
    arguments, constants = launch.arguments, launch.constants
    queries = matrix(arguments["queries"])
    stored = {
        **{"rows": arguments["N"], "columns": arguments["M"], "width": queries.shape[1]},
        **{"itemsize": queries.element_size(), "store": arguments["out"] is not None},
        **{"group": constants["GROUP_N"], "programs": launch.programs},
    }
    if launch.kernel.__name__ == SPECIALISED:
        (half, step), (columns, _) = (arguments[side].block_shape for side in ("queries", "candidates"))
        tile = {"tile": [2 * half, columns], "step": step}
        return {**stored, **tile, "descriptors": True, "lead": constants["LEAD"]}
    tile = {"tile": [constants["BLOCK_N"], constants["BLOCK_M"]], "step": constants["BLOCK_D"]}
    return {**stored, **tile, "descriptors": bool(constants["DESCRIPTORS"])}


def chunk_of_cosines(launch: Launch) -> Stored:
    """What the model reads of the kernels of MixCSE's released form; how often their code runs through."""
    if not launch.kernel.__name__.startswith("three_block"):
        return {}
    arguments, constants = launch.arguments, launch.constants
    lines, N = arguments["cosines"].shape
    if "BLOCK" in constants:
        stored = {"rows": lines, "columns": N, "store": True}
        return {**stored, "passes": launch.programs * -(-N // constants["BLOCK"])}
    return {"passes": launch.programs * -(-N // constants["BLOCK_COLUMNS"])}

"""Scratch for calls of the selection kernel."""

import torch

from flowlib.kernels import select


def scratch(
    rows: int, lists: int, width: int, top_k: int, device: str = "cpu", ratio_q16: int = 0
) -> dict[str, torch.Tensor]:
    """What ``launch_select`` needs for rows of at most `width` pages, by argument: int32 ``[rows, lists, words]``."""
    words = select.scratch_of(width, top_k, ratio_q16)
    return {name: torch.zeros(rows, lists, n, dtype=torch.int32, device=device) for name, n in words.items()}

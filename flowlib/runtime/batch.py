"""The requests of one decode step."""

from __future__ import annotations

import torch

from flowlib.core.errors import BatchError


class Batch:
    """Page table and lengths of one step; one row per query token.

    Args:
        page_table: int32 ``[bs, W]``, logical to physical page, columns adjacent in memory. Entries past a row's pages
            are never read.
        seq_lens: int32 ``[bs]``, tokens of each request, the query tokens among them; contiguous.
        q_lens: int32 ``[bs]``, query tokens of each request; ``None`` means one each. Token j of a request sees
            ``seq_len - q_len + j + 1`` tokens.

    Attributes:
        page_table: int32 ``[rows, W]``.
        seq_lens: int32 ``[rows]``, tokens each query token sees.
        multi_token: whether some request has more than one query token.

    Raises:
        BatchError: wrong dtype, rank, size or strides; a length that is negative or longer than the table (checked on
            CPU tensors only: on a device it would wait for it).
    """

    def __init__(self, page_table: torch.Tensor, seq_lens: torch.Tensor, q_lens: torch.Tensor | None = None) -> None:
        _check_int32("page_table", page_table, 2)
        _check_int32("seq_lens", seq_lens, 1)
        _check_strides(page_table, seq_lens)
        if page_table.shape[0] != seq_lens.shape[0]:
            raise BatchError(
                f"Batch: seq_lens has {seq_lens.shape[0]} values, expected {page_table.shape[0]}, "
                "one per row of page_table"
            )
        if page_table.device != seq_lens.device:
            raise BatchError(
                f"Batch: page_table is on {page_table.device}, seq_lens on {seq_lens.device}; expected one device"
            )
        if not seq_lens.is_cuda and bool((seq_lens < 0).any()):
            raise BatchError(f"Batch: seq_lens has {int(seq_lens.min())}, expected lengths of at least 0")
        self.multi_token = False
        if q_lens is not None:
            page_table, seq_lens = _expand(page_table, seq_lens, q_lens)
            self.multi_token = bool((q_lens > 1).any())
        self.page_table = page_table
        self.seq_lens = seq_lens

    @property
    def size(self) -> int:
        """Rows: query tokens."""
        return self.page_table.shape[0]

    @property
    def width(self) -> int:
        """Columns of the page table."""
        return self.page_table.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the batch lies."""
        return self.page_table.device


def _check_int32(name: str, value: torch.Tensor, rank: int) -> None:
    if not isinstance(value, torch.Tensor) or value.dim() != rank or value.dtype is not torch.int32:
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise BatchError(f"Batch: {name} is {got}, expected an int32 tensor of rank {rank}")


def _check_strides(page_table: torch.Tensor, seq_lens: torch.Tensor) -> None:
    if page_table.stride(1) != 1 and page_table.shape[1] > 1:
        raise BatchError(
            f"Batch: the columns of page_table have stride {page_table.stride(1)}, expected 1; "
            "pass page_table.contiguous()"
        )
    if not seq_lens.is_contiguous():
        raise BatchError(f"Batch: seq_lens has stride {seq_lens.stride(0)}, expected 1; pass seq_lens.contiguous()")


def _expand(
    page_table: torch.Tensor, seq_lens: torch.Tensor, q_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_int32("q_lens", q_lens, 1)
    if q_lens.shape != seq_lens.shape:
        raise BatchError(f"Batch: q_lens has {q_lens.shape[0]} values, expected {seq_lens.shape[0]}, one per request")
    if bool((q_lens < 0).any()) or bool((q_lens > seq_lens).any()):
        raise BatchError(
            f"Batch: q_lens is {q_lens.tolist()}, expected from 0 to the request's seq_len {seq_lens.tolist()}: "
            "query tokens are counted in seq_lens"
        )
    counts = q_lens.to(torch.int64)
    owner = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    j = torch.arange(len(owner), device=counts.device) - first
    seen = (seq_lens[owner] - q_lens[owner] + j + 1).to(torch.int32)
    return page_table[owner].contiguous(), seen

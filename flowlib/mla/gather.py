"""Copying a chunk of cached latent rows out of the pages of a pool."""

from __future__ import annotations

import torch

from flowlib.compiler.load import load_function
from flowlib.core.errors import BatchError, FormatError, OptionError
from flowlib.mla.checks import check_impl, check_tensor, check_writable

_LAUNCH = "flowlib.kernels.mla_gather:launch_gather"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def gather_latent(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    token_to_seq: torch.Tensor,
    num_tokens: int,
    out: torch.Tensor,
    seq_starts: torch.Tensor | None = None,
    impl: str = "reference",
) -> torch.Tensor:
    """Copies latent rows of several requests, one after the other, bit by bit.

    ``out[t] = cache[block_table[b, p // page], p % page]`` with ``b = token_to_seq[t]`` and
    ``p = t - cu_seq_lens[b] + seq_starts[b]``. Starts need no alignment. Nothing but the named slots is read.

    Args:
        cache: ``[pages, page, D]`` latent rows, any strides; fp32, bf16, fp16 (fp64).
        block_table: int32 ``[n, W]``, logical to physical pages; its columns adjacent in memory.
        cu_seq_lens: int32 ``[n + 1]``, first row of each request in `out`, and the end; contiguous.
        token_to_seq: int32 ``[at least num_tokens]``, request of each row; contiguous.
        num_tokens: rows to copy; those of `out` past it are left alone.
        out: ``[at least num_tokens, D]`` of the cache's dtype, any strides.
        seq_starts: int32 ``[n]``, position of each request's first row; ``None`` means 0.
        impl: ``"reference"`` or ``"triton"``.

    Returns:
        `out`.

    Raises:
        ShapeError, FormatError, BatchError, OptionError, BackendError: before anything is copied. Page ids and
            requests are looked at on the CPU only: on a device it would wait for them.
    """
    check_cache("gather_latent", cache)
    device = cache.device
    check_tensor("gather_latent", "out", out, "rows D", (None, cache.shape[2]), cache.dtype, device)
    check_writable("gather_latent", "out", out)
    _check_index(block_table, cu_seq_lens, token_to_seq, seq_starts, device)
    room = min(out.shape[0], token_to_seq.shape[0])
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or not 0 <= num_tokens <= room:
        raise OptionError(
            f"gather_latent: num_tokens is {num_tokens!r}, expected from 0 to {room}: out has {out.shape[0]} rows, "
            f"token_to_seq {token_to_seq.shape[0]}"
        )
    check_impl("gather_latent", impl, device)
    if num_tokens == 0:
        return out
    if device.type == "cpu":
        _check_requests(token_to_seq[:num_tokens], block_table.shape[0])
        _check_pages(cache, block_table, *_addresses(cache, cu_seq_lens, token_to_seq, num_tokens, seq_starts))
    if impl == "triton":
        load_function(_LAUNCH)(cache, block_table, cu_seq_lens, token_to_seq, out, num_tokens, seq_starts)
        return out
    request, page, slot = _addresses(cache, cu_seq_lens, token_to_seq, num_tokens, seq_starts)
    out[:num_tokens] = cache[block_table[request, page].to(torch.int64), slot]
    return out


def _addresses(
    cache: torch.Tensor, cu: torch.Tensor, owner: torch.Tensor, total: int, starts: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Request, logical page and slot, int64 ``[total]`` each."""
    request = owner[:total].to(torch.int64)
    position = torch.arange(total, device=owner.device) - cu[request]
    if starts is not None:
        position = position + starts[request]
    return request, position // cache.shape[1], position % cache.shape[1]


def check_cache(what: str, cache: object) -> None:
    """Raises unless `cache` is a pool of plain latent rows.

    A pool of bytes or float8 holds rows packed with their scales (656 bytes a token in FlashMLA's layout): copied as
    plain values they would be garbage.
    """
    if isinstance(cache, torch.Tensor) and cache.element_size() == 1:
        raise FormatError(
            f"{what}: cache is {cache.dtype}, whose rows need their scales; expected plain rows of "
            f"{', '.join(str(d).removeprefix('torch.') for d in _DTYPES)}"
        )
    check_tensor(what, "cache", cache, "pages page D", (None, None, None), _DTYPES)


def _check_index(
    table: torch.Tensor, cu: torch.Tensor, owner: torch.Tensor, starts: torch.Tensor | None, device: torch.device
) -> None:
    what = "gather_latent"
    check_tensor(what, "block_table", table, "n W", (None, None), torch.int32, device)
    n = table.shape[0]
    check_tensor(what, "cu_seq_lens", cu, "n+1", (n + 1,), torch.int32, device)
    check_tensor(what, "token_to_seq", owner, "rows", (None,), torch.int32, device)
    if starts is not None:
        check_tensor(what, "seq_starts", starts, "n", (n,), torch.int32, device)
    given = {"block_table": table, "cu_seq_lens": cu, "token_to_seq": owner, "seq_starts": starts}
    for name, value in given.items():
        if value is not None and value.shape[-1] > 1 and value.stride(-1) != 1:
            raise BatchError(
                f"{what}: the last axis of {name} has stride {value.stride(-1)}, expected 1; pass {name}.contiguous()"
            )


def _check_requests(owner: torch.Tensor, n: int) -> None:
    if int(owner.min()) < 0 or int(owner.max()) >= n:
        raise BatchError(f"gather_latent: token_to_seq names request {_outside(owner)}, expected from 0 to {n - 1}")


def _check_pages(
    cache: torch.Tensor, table: torch.Tensor, request: torch.Tensor, page: torch.Tensor, slot: torch.Tensor
) -> None:
    if int(page.min()) < 0 or int(page.max()) >= table.shape[1]:
        row = int(((page < 0) | (page >= table.shape[1])).nonzero()[0])
        raise BatchError(
            f"gather_latent: row {row} is in logical page {int(page[row])} of request {int(request[row])}, "
            f"block_table has {table.shape[1]} columns"
        )
    physical = table[request, page]
    if int(physical.min()) < 0 or int(physical.max()) >= cache.shape[0]:
        raise BatchError(
            f"gather_latent: block_table has page {_outside(physical)}, expected from 0 to {cache.shape[0] - 1}"
        )


def _outside(values: torch.Tensor) -> int:
    return int(values.min()) if int(values.min()) < 0 else int(values.max())

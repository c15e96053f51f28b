"""From latent rows to the keys and values of all heads."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flowlib.core.errors import OptionError, ShapeError
from flowlib.mla.checks import check_positive, check_tensor

UpProjection = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""``[tokens, kv_lora_rank + rope]`` latent rows to keys ``[tokens, H, D]`` and values ``[tokens, H, Dv]``."""

_BLOCK_BYTES = 8 << 20
"""Of latents that all heads are multiplied with in turn: no more than what stays in a device's L2 cache meanwhile."""


def up_projection(weight: torch.Tensor, num_heads: int, v_head_dim: int = 128) -> UpProjection:
    """The up-projection of multi-head latent attention (DeepSeek-V2, section 2.1) as :func:`chunked_prefill` calls it.

    A latent row is ``[kv_lora_rank | rope]``. Its first part times the weight is ``[nope | v]`` of every head; a key
    is ``[nope | rope]``, the rope part shared by all heads. Keys and values are contiguous, and products are written
    where they stay: nothing is concatenated. No gradients are recorded.

    Args:
        weight: ``[kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim)]``, the transpose of ``kv_b_proj.weight``.
            Products are computed in its dtype; keys and values come in the latent rows' dtype.
        num_heads: H.
        v_head_dim: Dv.

    Raises:
        OptionError, ShapeError, FormatError: sizes that do not fit.
    """
    what = "up_projection"
    check_positive(what, "num_heads", num_heads)
    check_positive(what, "v_head_dim", v_head_dim)
    check_tensor(what, "weight", weight, "kv_lora_rank H*(nope+v)", (None, None))
    rank, columns = weight.shape
    if columns % num_heads or columns // num_heads <= v_head_dim:
        raise ShapeError(
            f"{what}: weight has {columns} columns, expected num_heads={num_heads} times (nope + v_head_dim="
            f"{v_head_dim})"
        )
    nope = columns // num_heads - v_head_dim
    weights = weight.unflatten(1, (num_heads, -1)).transpose(0, 1).split((nope, v_head_dim), -1)
    block = max(1, _BLOCK_BYTES // (rank * weight.element_size()))

    @torch.no_grad()
    def project(latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if latent.shape[-1] < rank:
            raise OptionError(f"{what}: latent rows have {latent.shape[-1]} values, the weight needs {rank} and rope")
        k = latent.new_empty(len(latent), num_heads, nope + latent.shape[1] - rank)
        v = latent.new_empty(len(latent), num_heads, v_head_dim)
        _repeat(latent[:, rank:], k[..., nope:])
        blocks = (x.split(block) for x in (latent[:, :rank], k[..., :nope], v))
        for rows, *parts in zip(*blocks, strict=True):
            content = rows.to(weight.dtype)
            if content.stride(1) != 1 or content.stride(0) < rank:
                content = content.contiguous()  # bmm would copy it, once for every head
            for part, of_heads in zip(parts, weights, strict=True):
                _multiply(content, of_heads, part)
        return k, v

    return project


def _multiply(content: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """``[rows, rank]`` times the weight ``[H, rank, n]`` into `out` ``[rows, H, n]``, in place if it has its dtype."""
    content = content.expand(len(weight), -1, -1)
    if out.dtype is weight.dtype:
        torch.bmm(content, weight, out=out.transpose(0, 1))
    else:
        out.copy_(torch.bmm(content, weight).transpose(0, 1))


def _repeat(rope: torch.Tensor, out: torch.Tensor) -> None:
    """``[T, rope]`` into every head of `out` ``[T, H, rope]``; by words, as torch copies strided rows by elements."""
    if _is_words(rope) and _is_words(out):
        rope, out = rope.view(torch.int64), out.view(torch.int64)
    out.copy_(rope[:, None])


def _is_words(x: torch.Tensor) -> bool:
    """Whether each row is whole int64 words."""
    per_word = 8 // x.element_size()
    sizes = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return x.stride(-1) == 1 and x.data_ptr() % 8 == 0 and all(n % per_word == 0 for n in sizes)

"""From latent rows to the keys and values of all heads."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flowlib.core.errors import OptionError, ShapeError
from flowlib.mla.checks import check_positive, check_tensor

UpProjection = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""``[tokens, kv_lora_rank + rope]`` latent rows to keys ``[tokens, H, D]`` and values ``[tokens, H, Dv]``."""


def up_projection(weight: torch.Tensor, num_heads: int, v_head_dim: int = 128) -> UpProjection:
    """The up-projection of multi-head latent attention (DeepSeek-V2, section 2.1) as :func:`chunked_prefill` calls it.

    A latent row is ``[kv_lora_rank | rope]``. Its first part times the weight is ``[nope | v]`` of every head; a key
    is ``[nope | rope]``, the rope part shared by all heads.

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

    def project(latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if latent.shape[-1] < rank:
            raise OptionError(f"{what}: latent rows have {latent.shape[-1]} values, the weight needs {rank} and rope")
        both = (latent[:, :rank].to(weight.dtype) @ weight).to(latent.dtype)
        both = both.view(len(latent), num_heads, nope + v_head_dim)
        rope = latent[:, None, rank:].expand(-1, num_heads, -1)
        return torch.cat((both[..., :nope], rope), -1), both[..., nope:]

    return project

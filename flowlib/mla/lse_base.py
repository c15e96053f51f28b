"""Which logarithm an attention kernel's log-sum-exp is to, measured on known scores before it is first used.

FlashInfer returns base 2, FlashAttention the natural logarithm; partial results merged in the wrong base are plausible
and wrong (12 % of the output at a prefix of 3072 tokens). A kernel that leaves a part of the scale out of its
log-sum-exp shows here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from flowlib.core.errors import BackendError
from flowlib.mla.ragged import RaggedBatch

Runner = Callable[..., None]
_SCALE, _DOT = 0.114721386792926, 16.0  # DeepSeek-V2-Lite's scale, which is not D ** -0.5; a dot exact in any dtype
_TOLERANCE = 2e-2  # the bases differ by 44 %
_factors: dict[object, float] = {}


def lse_factor(
    name: str, runner: Runner, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int]
) -> float:
    """What the kernel's log-sum-exp is multiplied with to be natural; measured once, which waits for the device.

    Args:
        name: of the attention.
        runner: ``runner(q, k, v, batch, scale, causal, out, lse)``.
        device, dtype, head_dims: what it will run on and with; ``head_dims`` is ``(D, Dv)``.

    Raises:
        BackendError: it is neither natural nor base 2.
    """
    key = (runner, device, dtype, head_dims)
    if key not in _factors:
        _factors[key] = _measured(name, runner, device, dtype, head_dims)
    return _factors[key]


def _measured(
    name: str, runner: Runner, device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int]
) -> float:
    """Three requests: one key, whose log-sum-exp is its score; two equal keys: log 2 more; a score of 0: 0."""
    size, v_size = head_dims
    batch = RaggedBatch.of((0, 1, 2, 3), (0, 1, 3, 4), device)
    q, k = (torch.zeros(rows, 1, size, dtype=dtype, device=device) for rows in (3, 4))
    q[..., 0], k[:3, :, 0] = _DOT, 1.0
    v = torch.ones(4, 1, v_size, dtype=dtype, device=device)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    out = torch.empty(3, 1, v_size, dtype=dtype, device=device)
    lse = torch.empty(3, 1, dtype=wide, device=device)
    runner(q, k, v, batch, _SCALE, False, out, lse)
    got, score = lse.flatten().tolist(), _SCALE * _DOT
    wanted = [score, score + math.log(2.0), 0.0]
    for factor in (1.0, math.log(2.0)):
        if all(abs(x * factor - y) <= _TOLERANCE for x, y in zip(got, wanted, strict=True)):
            return factor
    raise BackendError(
        f"attention={name!r}: the log-sum-exp of its kernel is {[round(x, 4) for x in got]} for one key of score "
        f"{score:.4f}, two of them and one of score 0; expected {[round(x, 4) for x in wanted]} (natural logarithm) or "
        f"{[round(x / math.log(2.0), 4) for x in wanted]} (base 2)"
    )

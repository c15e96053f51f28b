"""Steps that must agree in every bit."""

from __future__ import annotations

import torch

import flowlib
from flowlib.runtime.plan import StepOutput

IMPLEMENTATIONS = ("reference", "triton")
SPEC = flowlib.Spec(
    page_size=8, head_dim=24, v_head_dim=40, group_size=3, num_kv_heads=2, top_k=2, max_pages=14, max_batch=8
)
"""The numbers of most invariants: small, odd, bfloat16."""
LENGTHS = (93, 41, 0, 25)
"""With SPEC: two rows with more pages than the budget, an empty one, and one exactly at the budget."""


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, so that NaN equals NaN and 0.0 differs from -0.0."""
    return x.detach().cpu().contiguous().view(torch.uint8)


def differing(one: StepOutput, other: StepOutput, columns: int | None = None) -> list[str]:
    """Names of the outputs that differ in any bit; scores are compared in the first `columns` of the table."""
    own = ("o", "lse", "tau", "mass", "certified", "pages", "lengths")
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in own}
    pairs = {name: pair for name, pair in pairs.items() if pair != (None, None)}
    if one.scores is not None and other.scores is not None:
        pairs["scores"] = (one.scores[..., :columns], other.scores[..., :columns])
    names = [n for n, (a, b) in pairs.items() if a.shape != b.shape or not torch.equal(bits(a), bits(b))]
    return names + (["scores"] if (one.scores is None) != (other.scores is None) else [])


def total(out: StepOutput) -> torch.Tensor:
    """What o was divided by: the log-sum-exp ``[rows, H_q]``, or entmax's threshold."""
    return out.tau if out.lse is None else out.lse


def page_counts(lengths: tuple[int, ...], page_size: int) -> list[int]:
    """Pages of requests of some lengths."""
    return [-(-n // page_size) for n in lengths]


def tokens(
    spec: flowlib.Spec, count: int, seed: int, device: str, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """K ``[count, H_kv, D]`` and V ``[count, H_kv, Dv]`` as stored, drawn on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(count, spec.num_kv_heads, d) for d in (spec.head_dim, spec.dv)]
    k, v = ((torch.randn(s, generator=generator) * scale).to(spec.kv_dtype).to(device) for s in shapes)
    return k, v


def int32(values: object, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)

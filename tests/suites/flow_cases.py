"""The specs and ragged batches that every flow is checked with."""

from __future__ import annotations

import torch

import flowlib
from flowlib.errors import OptionError
from flowlib.testing import Case

FLOWS = flowlib.list_flows(mla=False)
"""Flows over K and V; those over latents have cases of their own, tests/suites/mla_flows.py."""
SMALL = {"num_kv_heads": 2, "max_pages": 24, "max_batch": 8}
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


def case(label: str, lengths: tuple[int, ...], q_lens: tuple[int, ...] | None = None, **sizes: object) -> Case:
    """A case by a short label; `lengths` in tokens."""
    return Case(label, flowlib.Spec(**{**SMALL, **sizes}), lengths, q_lens)


CASES = [
    case("bf16-g3-d64-p16", (0, 1, 170, 97), kv_dtype=BF16, group_size=3, head_dim=64, page_size=16, top_k=3),
    case("fp32-g7-d80-p16", (16, 135, 97), kv_dtype=FP32, group_size=7, head_dim=80, page_size=16, num_kv_heads=1,
         top_k=2, bos=2, eos=2),
    case("bf16-g4-d96-p1", (19, 3, 24), kv_dtype=BF16, group_size=4, head_dim=96, page_size=1, top_k=5),
    case("bf16-g1-d64-p48", (48, 500, 385), kv_dtype=BF16, group_size=1, head_dim=64, v_head_dim=96, page_size=48,
         top_k=1),
    case("bf16-g8-d128-p64", (577, 321), kv_dtype=BF16, group_size=8, head_dim=128, page_size=64, num_kv_heads=1,
         top_k=1, bos=0),
    case("fp32-g3-d24-p5-ratio", (119, 0, 64), kv_dtype=FP32, group_size=3, head_dim=24, v_head_dim=40, page_size=5,
         num_kv_heads=3, top_k=1, top_k_ratio=0.3, eos=3),
    case("fp16-g4-d64-p16-alibi", (165, 140), kv_dtype=FP16, group_size=4, head_dim=64, page_size=16, top_k=2,
         scale=0.2,
         alibi_slopes=tuple(2.0 ** -(h + 1) for h in range(8))),
    case("fp8-g3-d64-p16", (165, 100), kv_dtype=FP8, group_size=3, head_dim=64, page_size=16, top_k=2, k_scale=0.5,
         v_scale=2.0),
    case("bf16-g3-d64-p16-queries", (150, 40, 7), (3, 0, 2), kv_dtype=BF16, group_size=3, head_dim=64, page_size=16,
         top_k=2),
    case("fp32-g3-d32-p8-dense-below", (40, 41, 90), kv_dtype=FP32, group_size=3, head_dim=32, page_size=8, top_k=1,
         dense_below=40),
]  # fmt: skip


def cases_of(name: str) -> list[Case]:
    """The cases of a flow; short rows are kept dense only without state."""
    return [c for c in CASES if not (c.spec.dense_below and name in STATEFUL)]


def plan_for(name: str, spec: flowlib.Spec, **options: object) -> flowlib.Plan:
    """A flow's plan; where the flow refuses the page size, at its default one."""
    flow = flowlib.build(name, **options)
    try:
        return flowlib.profile(flow, spec)
    except OptionError:
        if spec.page_size == flow.default_page_size:
            raise
        return flowlib.profile(flow, spec.replace(page_size=flow.default_page_size))


STATEFUL = {name for name in FLOWS if plan_for(name, flowlib.Spec()).state_fields}
"""Flows that carry something from one step to the next."""

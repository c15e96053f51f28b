"""Entmax attention of a plan as Triton kernels: its scratch, and its launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flowlib.core.attention import Entmax

if TYPE_CHECKING:
    from flowlib.runtime.plan import Plan, StepOutput

LAUNCH = "flowlib.kernels.entmax:launch_entmax"
PROGRAMS = 1024
"""Programs that values are cut into: twice those of softmax attention were faster for heads of 64."""


def unestimated_pages(plan: Plan) -> int:
    """Rows of at most so many pages have none that is scored, or are within the budget and attended in full."""
    return max(plan.full_pages, plan.spec.bos + plan.spec.eos)


def unestimated(plan: Plan, seq_lens: torch.Tensor) -> torch.Tensor:
    """Which rows ``[rows]`` have no estimate of their threshold, which is solved for whatever the mode."""
    size = plan.spec.page_size
    pages = torch.div(seq_lens.to(torch.int64) + size - 1, size, rounding_mode="floor")
    return (pages <= unestimated_pages(plan)) | (seq_lens <= plan.spec.dense_below)


def scratch(plan: Plan, rows: int, device: str | torch.device) -> dict[str, torch.Tensor]:
    """Scores, tile maxima and thresholds of `rows` rows, by name."""
    from flowlib.kernels.entmax import workspace

    spec = plan.spec
    shapes = workspace(spec.num_heads, plan.max_selected, spec.page_size)
    return {
        name: torch.empty(rows, *shape, dtype=getattr(torch, dtype), device=device)
        for name, (shape, dtype) in shapes.items()
    }


def narrowed(work: dict[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    """The scratch of at most as many rows, under the names of the launch function."""
    names = ("z", "tile_max", "state", "support", "weights", "active")
    return {name: work[name][:rows] for name in names if name in work}


def arguments(plan: Plan, attention: Entmax, out: StepOutput) -> dict[str, Any]:
    """What the launch function takes beside the arguments that all attention kernels take.

    Without a selection (`every` page of a row is attended) nothing was estimated, and nothing needs to be proven.
    """
    hints, spec = plan.program.hints, plan.spec
    estimate, bound = (out.workspace.get(hints[name]) if name in hints else None for name in ("estimate", "bound"))
    given: dict[str, Any] = {"alpha": attention.alpha, "tau": out.tau, "mass": out.mass}
    given |= {"bos": spec.bos, "eos": spec.eos}
    if estimate is not None and attention.tau_mode != "exact":
        given |= {
            "mode": attention.tau_mode, "steps": attention.niter, "estimate": estimate,
            "exact_pages": unestimated_pages(plan), "exact_tokens": spec.dense_below,
        }  # fmt: skip
    if "a_of_head" in out.workspace:
        given["a_of_head"] = out.workspace["a_of_head"]
    if bound is not None and out.certified is not None:
        given |= {"bounds": bound.flatten(1, 2), "certified": out.certified.view(torch.int8)}
    return given | narrowed(out.workspace, out.o.shape[0])

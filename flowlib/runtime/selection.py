"""The scratch of segment ops and of a selection, and a selection op called alone on real scores."""

from __future__ import annotations

import math

import torch

from flowlib.compiler.load import load_function
from flowlib.compiler.program import Program, SegmentStage
from flowlib.core.formats import Mode
from flowlib.core.op import SelectOp
from flowlib.core.spec import Spec
from flowlib.runtime import reference
from flowlib.runtime.batch import Batch


def scratch(
    op: SelectOp, spec: Spec, lists: tuple[int, int], width: int, device: str | torch.device
) -> dict[str, torch.Tensor]:
    """What long rows are selected by, by the name of the selection kernel's argument: int32 ``[*lists, words]``, zero.

    Args:
        lists: (rows, page lists of a row).
        width: most pages of a row.
    """
    if not op.scored:
        return {}
    words = load_function("flowlib.kernels.select:scratch_of")(width, *op.limits(spec))
    return {name: torch.zeros(*lists, n, dtype=torch.int32, device=device) for name, n in words.items()}


def plan_scratch(
    program: Program, spec: Spec, lists: tuple[int, int], width: int, device: str | torch.device
) -> dict[str, torch.Tensor]:
    """That of :func:`scratch`, and fp32 for what the launch functions of segment ops ask for, by ``stage:argument``."""
    found, entries = scratch(program.selection.op, spec, lists, width, device), lists[0] * spec.num_kv_heads
    for stage in program.stages:
        if isinstance(stage, SegmentStage) and stage.op.scratch:
            planes = math.prod(program.buffers[stage.sources[0]].shape)
            for name, shape in load_function(stage.op.scratch)(width).items():
                found[f"{stage.name}:{name}"] = torch.empty(entries, planes, *shape, device=device)
    return found


def select_alone(
    op: SelectOp, scores: torch.Tensor | None, scored: torch.Tensor, batch: Batch, spec: Spec, mode: Mode
) -> tuple[torch.Tensor, torch.Tensor]:
    """Page lists int32 ``[rows, H_kv * lanes, M]`` and their lengths, of scores ``[R, lanes, W]``."""
    counts = reference.num_pages_of(batch, spec)
    widest = min(batch.width, max(op.budget(spec, batch.width) + spec.bos + spec.eos, 1))
    if mode is Mode.REFERENCE:
        budgets = torch.tensor([op.budget(spec, n) for n in counts.tolist()], device=batch.device)
        chosen = op.meaning(scores, scored, budgets.repeat_interleave(spec.num_kv_heads))  # type: ignore[arg-type]
        return reference.page_lists(chosen, counts, spec, widest)
    lanes = 1 if scores is None else scores.shape[1]
    pages = torch.empty(batch.size, spec.num_kv_heads * lanes, widest, dtype=torch.int32, device=batch.device)
    lengths = torch.empty(pages.shape[:2], dtype=torch.int32, device=batch.device)
    load_function("flowlib.kernels.select:launch_select")(
        None if scores is None else scores.to(torch.float32), batch.seq_lens, pages, lengths, lanes=lanes,
        num_kv_heads=spec.num_kv_heads, page_size=spec.page_size, bos=spec.bos, eos=spec.eos,
        top_k=op.limits(spec)[0], ratio_q16=op.limits(spec)[1], dense_below=0,
        scored=op.scored, width=batch.width,
        **scratch(op, spec, (batch.size, pages.shape[1]), batch.width, batch.device),
    )  # fmt: skip
    return pages, lengths

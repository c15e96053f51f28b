"""The whole of latent prefill against one causal attention in float64."""

import importlib
import sys
from pathlib import Path

import torch

from flowlib import mla
from flowlib.testing import tolerance

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))
cases = importlib.import_module("mla_cases")
checks = importlib.import_module("mla_checks")
mutations = importlib.import_module("mla_mutations")

ALL = (*cases.LOOP_CASES, *cases.MORE_CASES)


def schedules(case):
    """Those that the workspace is large enough for."""
    sharing = max(1, sum(c > 0 for c in case.context))
    return ["packed", "even"] if case.workspace // sharing >= case.page else ["packed"]


def pairs(chosen):
    """(case, schedule), for parametrisation."""
    return [(case, schedule) for case in chosen for schedule in schedules(case)]


def name(value):
    """A readable id."""
    return value.name.replace(" ", "-") if isinstance(value, cases.Case) else None


def check(case, schedule, impl, device, attention="auto"):
    """Within the gate and the derived tolerance; outputs and scratch are NaN before, inputs as they were after."""
    made = cases.problem(case, device)
    context = mla.build_chunked_context(case.context, case.query_start_loc, case.workspace, case.page, schedule, device)
    if schedule == "even" and case.chunks:
        assert (context.max_context_chunk, context.num_chunks) == (case.step, case.chunks)
    rows = context.max_token_num_over_chunk
    workspace = torch.empty(rows + 3, case.sizes.latent, dtype=case.dtype, device=device)
    given = [x.clone() for x in (made.q, made.k, made.v, made.cache, made.block_table)]
    done = mla.chunked_prefill(
        *given, context, made.up_project, scale=case.sizes.scale, workspace=workspace, impl=impl, attention=attention
    )
    assert made.error(done.o) <= cases.GATE
    assert tolerance.judge(done.o, made.truth, made.tolerance()).ok
    assert tolerance.judge(done.lse, made.truth_lse, torch.full_like(made.truth_lse, 1e-5)).ok
    assert workspace[rows:].isnan().all()
    for after, before in zip(given, (made.q, made.k, made.v, made.cache, made.block_table), strict=True):
        assert torch.equal(after.nan_to_num(7.0), before.nan_to_num(7.0))
    return done

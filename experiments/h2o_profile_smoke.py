"""Do the four H2O flows profile for every group size, with the options they are given?

Profiling needs neither a device nor Triton. With --impl triton the workspace of a step is also allocated, and the
generated kernels are loaded. Exit status 1 on any failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from h2o_cli import Device, Impl, console, finish, prepare, refusals, table, verdict

import flowlib
from flowlib.core.graph import Graph
from flowlib.errors import OptionError

PAGE_LEVEL = ("h2o_sparse_attention", "gqa_h2o_sparse_attention")
TOKEN_LEVEL = ("h2o_token_sparse_attention", "gqa_h2o_token_sparse_attention")
GROUPS = (1, 3, 4, 7, 8)
HEAD_DIM, NUM_PAGES, BATCH = 128, 16, 3
RESOLVED, GIVEN = 0.088388, 0.09
DECAY = 0.984375


@dataclass
class Profiled:
    """One flow for one group size.

    Attributes:
        indexer, cache: ops the graphs reach, in order.
        fields: bytes per page of all fields, all kv heads.
        buffers: bytes of the values that cross a kernel boundary, for the spec's largest batch.
        failures: what is wrong.
    """

    flow: str
    group: int
    indexer: list[str]
    cache: list[str]
    fields: int
    buffers: int
    failures: list[str] = field(default_factory=list)


def profile(flow: str, group: int, **options: float) -> flowlib.Plan:
    """The flow's plan, head_dim 128, page_size 16 (page level) or 1 (token level)."""
    page_size = 1 if flow in TOKEN_LEVEL else 16
    return flowlib.profile(flowlib.build(flow, None, **options), spec_of(page_size, group))


def resolved(flow: str, **options: float) -> Any:
    """The profiled copy of the flow for group size 4; its ops are attributes."""
    return profile(flow, 4, **options).flow


def spec_of(page_size: int, group: int) -> flowlib.Spec:
    """The spec of all checks here."""
    return flowlib.Spec(page_size=page_size, head_dim=HEAD_DIM, group_size=group, max_pages=NUM_PAGES, max_batch=BATCH)


def smoke(flow: str, group: int, device: str, impl: str) -> Profiled:
    """Profiles a flow and checks dispatch, shapes, formats and sizes."""
    plan = profile(flow, group)
    traced, spec = plan.program.traced, plan.spec
    buffers = {name: b.nbytes(BATCH * spec.num_kv_heads, NUM_PAGES) for name, b in plan.program.buffers.items()}
    found = Profiled(
        flow, group, ops_of(traced.indexer), ops_of(traced.cache), plan.field_bytes_per_page, sum(buffers.values())
    )
    token = flow in TOKEN_LEVEL
    wanted = {"hh_score": (1, 1)} if token else dict.fromkeys(("k_mean", "k_max", "k_min"), (1, HEAD_DIM))
    shapes = {name: f.shape for name, f in plan.fields.items()}
    selection, checks = traced.indexer.selection, found.failures
    _expect(checks, shapes == wanted, f"fields {shapes}, expected {wanted}")
    _expect(checks, plan.state_fields == (("hh_score",) if token else ()), f"state fields {plan.state_fields}")
    _expect(checks, set(traced.cache.stores) == set(wanted), f"forward_cache writes {sorted(traced.cache.stores)}")
    _expect(checks, set(traced.indexer.stores) == set(plan.state_fields), "forward_indexer saves another field")
    scores = [] if selection is None else [(n.format.name, n.shape) for n in selection.inputs]
    _expect(checks, scores == [("RAGGED", (1, 1))], f"topK reads {scores}, expected one score per page")
    _expect(checks, all(buffers.values()) and bool(buffers), f"buffers of 0 bytes: {buffers}")
    _expect(checks, plan.max_selected == spec.top_k + spec.bos + spec.eos, f"page lists of {plan.max_selected}")
    _allocate(plan, buffers, device, impl, checks)
    return found


def _allocate(plan: flowlib.Plan, buffers: dict[str, int], device: str, impl: str, checks: list[str]) -> None:
    pool = flowlib.PagedPool(plan, NUM_PAGES, device)
    held = sum(f.nbytes for f in pool.fields.values())
    sized = NUM_PAGES * plan.field_bytes_per_page
    _expect(checks, held == sized, f"the pool's fields hold {held} bytes, profiled as {sized}")
    if impl == "triton":
        plan.prepare(impl, pool.device)
        out = plan.allocate(BATCH, NUM_PAGES, device)
        work = {name: out.workspace[name].nbytes for name in buffers}
        _expect(checks, work == buffers, f"the workspace holds {work} bytes, profiled as {buffers}")


def ops_of(graph: Graph) -> list[str]:
    """Names of the ops a graph reaches, inputs before users."""
    return [type(node.op).__name__ for node in graph.nodes() if not node.name]


def _expect(failures: list[str], ok: bool, text: str) -> None:
    if not ok:
        failures.append(text)


def refusal(flow: str) -> str:
    """The error of a token flow asked for page_size 16; empty if it took it."""
    try:
        flowlib.profile(flowlib.build(flow), spec_of(16, 4))
    except OptionError as error:
        return str(error)
    return ""


def wiring(flow: str) -> list[tuple[str, str, str, bool]]:
    """What the token flows make of their options: option, found, expected, whether they agree."""
    default, scaled, plain = resolved(flow), resolved(flow, scale=GIVEN), resolved(flow, decay=1.0)
    untouched = flowlib.build(flow)
    flowlib.profile(untouched, spec_of(1, 4).replace(head_dim=64))
    other: Any = flowlib.profile(untouched, spec_of(1, 4)).flow
    values = [
        ("scale, head_dim 128", default.softmax.scale, RESOLVED, 5e-7),
        ("scale, after another head_dim", other.softmax.scale, RESOLVED, 5e-7),
        ("scale=0.09", scaled.softmax.scale, GIVEN, 0.0),
        ("alpha", default.add.alpha, 1.0, 0.0),
        ("beta", default.add.beta, DECAY, 0.0),
        ("alpha, decay=1.0", plain.add.alpha, 1.0, 0.0),
        ("beta, decay=1.0", plain.add.beta, 1.0, 0.0),
    ]
    return [(name, f"{got:.8g}", f"{want:.8g}", abs(got - want) <= slack) for name, got, want, slack in values]


def weights(flow: str) -> list[tuple[str, str, str, bool]]:
    """What the page-level flows make of theirs."""
    add = resolved(flow, w_avg=0.75, w_peak=0.25).add
    values = [("alpha, w_avg=0.75", add.alpha, 0.75), ("beta, w_peak=0.25", add.beta, 0.25)]
    return [(name, f"{got:.8g}", f"{want:.8g}", got == want) for name, got, want in values]


def check_profiles(results: Sequence[Profiled]) -> bool:
    """Shows what was profiled."""
    rows = [[r.flow, str(r.group), str(r.fields), str(r.buffers), "; ".join(r.failures) or "ok"] for r in results]
    columns = ["flow", "group", "field bytes per page", f"buffer bytes, {BATCH} x {NUM_PAGES} pages", "checks"]
    table(f"Profiles, head_dim {HEAD_DIM}, 2 kv heads", columns, rows)
    for r in {r.flow: r for r in results}.values():
        console.print(f"  {r.flow}: {' '.join(r.indexer)} | cache: {' '.join(r.cache)}", markup=False, soft_wrap=True)
    ok = not any(r.failures for r in results)
    verdict("profile", ok, f"{len(results)} profiles: ops dispatch, shapes and formats check, buffers are sized")
    return ok


def check_options() -> bool:
    """Shows how options reach the ops."""
    found = [(flow, *w) for flow in TOKEN_LEVEL for w in wiring(flow)]
    found += [(flow, *w) for flow in PAGE_LEVEL for w in weights(flow)]
    rows = [[flow, name, got, want, "ok" if ok else "WRONG"] for flow, name, got, want, ok in found]
    table("Options", ["flow", "option", "found", "expected", ""], rows)
    ok = all(f[-1] for f in found)
    verdict("options", ok, f"scale resolves to head_dim ** -0.5 unless given, decay {DECAY} by default, weights kept")
    return ok


def check_refusals() -> bool:
    """Shows what the token flows say to page_size 16."""
    texts = {flow: refusal(flow) for flow in TOKEN_LEVEL}
    for text in texts.values():
        console.print(f"  {text or 'no error'}", markup=False, soft_wrap=True)
    ok = all(flow in text and "page_size" in text and "16" in text for flow, text in texts.items())
    verdict("page_size 16", ok, "refused by the token flows, naming flow and value")
    return ok


def main(
    device: Annotated[Device, typer.Option(help="Where pools are allocated.")] = Device.cpu,
    impl: Annotated[Impl, typer.Option(help="triton: load kernels and allocate workspace too.")] = Impl.reference,
) -> None:
    """Profiles the four H2O flows; no GPU is needed."""
    with refusals():
        prepare(device, impl)
        results = [smoke(f, g, device.value, impl.value) for f in (*PAGE_LEVEL, *TOKEN_LEVEL) for g in GROUPS]
        checks = [check_profiles(results), check_options(), check_refusals()]
    finish(all(checks))


if __name__ == "__main__":
    typer.run(main)

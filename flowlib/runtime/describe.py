"""A plan as text: fields, stages with the bytes they move, buffers, generated kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowlib.compiler.load import source_path
from flowlib.compiler.program import SegmentStage, SelectStage, TileStage
from flowlib.core.formats import FORMAT
from flowlib.core.graph import Field, Graph, topological
from flowlib.core.trace import given_fields

if TYPE_CHECKING:
    from flowlib.runtime.plan import Plan


def describe(plan: Plan, bandwidth: float | None = None) -> str:
    """What ``print(plan)`` shows; with a read `bandwidth` in TB/s the floor time of each stage, too."""
    spec, flow = plan.spec, type(plan.flow).__name__
    lines = [
        f"{flow}: page_size {spec.page_size}, head_dim {spec.head_dim}, "
        f"{spec.num_heads} query / {spec.num_kv_heads} kv heads, {str(spec.kv_dtype).removeprefix('torch.')}",
        f"budget: {spec.top_k} pages or {spec.top_k_ratio:g} of a row, plus {spec.bos} first and {spec.eos} last; "
        f"at most {plan.max_selected} of {spec.max_pages} pages attended",
        f"attention: {plan.attention}",
        "",
        f"fields ({plan.field_bytes_per_page} bytes per page and layer, "
        f"{plan.field_bytes_per_page / _kv_bytes_per_page(plan):.1%} of {'the latents' if spec.is_mla else 'K and V'})",
    ]
    lines += [
        f"  {f.name:<20} {f.kind:<8} {list(f.shape)!s:<12} {str(f.dtype).removeprefix('torch.')}{_rounded(f)}"
        for f in plan.fields.values()
    ]
    for graph in (plan.program.traced.cache, plan.program.traced.indexer):
        lines += ["", f"graph of {graph.side.value}", *graph_lines(graph)]
    lines += ["", *stage_lines(plan, bandwidth)]
    rows = spec.max_batch * spec.num_kv_heads
    total = sum(b.nbytes(rows, spec.max_pages) for b in plan.program.buffers.values())
    lines += ["", f"buffers ({total} bytes for {spec.max_batch} requests of {spec.max_pages} pages, scratch aside)"]
    for b in plan.program.buffers.values():
        size = b.nbytes(rows, spec.max_pages)
        shape = [rows, *b.shape, spec.max_pages] if b.paged else [rows, *b.shape]
        lines.append(f"  {b.name:<20} fp32 {shape} {size} bytes")
    return "\n".join([*lines, "", f"generated module: {source_path(plan.program.source).name}"])


def _rounded(field: Field) -> str:
    how = {"": "", "nearest": ", to nearest"}.get(field.rounding, f", rounded {field.rounding}")
    return f" times a scale{how}" if how else ""


def stage_lines(plan: Plan, bandwidth: float | None) -> list[str]:
    """A line per stage: bytes per page and kv head, MB of one step, floor time."""
    spec = plan.spec
    floor = "" if bandwidth is None else f" {'floor us':>9}"
    lines = [
        f"stages: bytes per page and kv head; MB a layer, {spec.max_batch} requests of {spec.max_pages} pages",
        f"  {'stage':<20} {'reads':>8} {'writes':>8} {'MB read':>9} {'MB wrote':>9}{floor}  kernel",
    ]
    total = 0.0
    for name, reads, writes, kernel in stage_rows(plan):
        selected = plan.max_selected * plan.lanes
        read_pages = {"update": 1, "attend": selected}.get(name, spec.max_pages)
        wrote_pages = {"update": 1, "select": selected}.get(name, spec.max_pages)
        rows = spec.max_batch * spec.num_kv_heads / 1e6
        read, wrote = rows * read_pages * reads, rows * wrote_pages * writes
        total += read + wrote
        floor = "" if bandwidth is None else f" {(read + wrote) / bandwidth:>9.2f}"
        lines.append(f"  {name:<20} {reads:>8} {writes:>8} {read:>9.3f} {wrote:>9.3f}{floor}  {kernel}")
    if bandwidth is not None:
        lines.append(f"  {'floor of a step':<20} {total / bandwidth:>47.2f}  all bytes at {bandwidth:g} TB/s")
    return lines


def graph_lines(graph: Graph) -> list[str]:
    """A line per op, inputs before users, then what goes into fields."""
    names: dict[int, str] = {}
    lines = []
    for node in graph.nodes():
        if node.name:
            names[id(node)] = node.name
            continue
        names[id(node)] = f"%{sum(n.startswith('%') for n in names.values())}"
        inputs = ", ".join(names[id(x)] for x in node.inputs)
        size = f"[{node.format.value}, {node.shape[0]}, {node.shape[1]}]"
        result = "o" if node is graph.selection else names[id(node)]
        lines.append(f"  {result} = {node.op} of {inputs or 'nothing'}" + ("" if result == "o" else f"  {size}"))
    return lines + [f"  {field} <- {names[id(node)]}" for field, node in graph.stores.items()]


def stage_rows(plan: Plan) -> list[tuple[str, int, int, str]]:
    """Stage, bytes read and written per page and kv head, kernel.

    Pages are those that finish (update), those in a list (writes of select, reads of attend), else those of the row.
    """
    spec = plan.spec
    rows: list[tuple[str, int, int, str]] = []
    for stage in plan.program.stages:
        if isinstance(stage, TileStage):
            rows.append((stage.name, _reads(plan, stage), _writes(plan, stage), "generated"))
        elif isinstance(stage, SegmentStage):
            size = sum(plan.program.buffers[source].nbytes(1, 1) for source in stage.sources)
            target = plan.program.buffers[stage.target]
            rows.append((stage.name, size, target.nbytes(1, 1) if target.paged else 0, stage.op.kernel))
        elif isinstance(stage, SelectStage):
            size = 0 if stage.scores is None else plan.program.buffers[stage.scores].nbytes(1, 1)
            rows.append(("select", size, 8, "flowlib.kernels.select:launch_select"))
    per_page = _kv_bytes_per_page(plan) // spec.num_kv_heads
    rows.append(("attend", per_page, 0, plan.attention_kernel))
    return rows


def _reads(plan: Plan, stage: TileStage) -> int:
    known = given_fields(plan.spec) | plan.fields
    leaves = {
        n.name: n for n in topological(o.node for o in stage.outputs) if n.name and n.format is not FORMAT.BATCHED
    }
    return sum(
        known[name].nbytes if node.format is FORMAT.PAGED else plan.program.buffers[name].nbytes(1, 1)
        for name, node in leaves.items()
    )


def _writes(plan: Plan, stage: TileStage) -> int:
    return sum(
        plan.fields[o.name].nbytes if o.kind == "field" else plan.program.buffers[o.name].nbytes(1, 1)
        for o in stage.outputs
        if o.kind != "rows"
    )


def _kv_bytes_per_page(plan: Plan) -> int:
    spec = plan.spec
    size = spec.head_dim if spec.is_mla else spec.head_dim + spec.dv
    return spec.num_kv_heads * spec.page_size * size * spec.kv_dtype.itemsize

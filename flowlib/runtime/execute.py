"""Execute mode: the stages of a program as Triton kernels. Nothing here allocates or waits for the device."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from flowlib.compiler.emit import column_blocks, joined_name, num_warps, tile_pages
from flowlib.compiler.load import load_function, load_source
from flowlib.compiler.program import SegmentStage, Stage, TileStage
from flowlib.core.attention import Entmax, Normaliser, Softmax
from flowlib.core.float8 import SCALES
from flowlib.core.spec import Spec
from flowlib.runtime.batch import Batch
from flowlib.runtime.entmax import arguments
from flowlib.runtime.pool import SATURATED

if TYPE_CHECKING:
    from flowlib.runtime.plan import Plan, StepOutput
    from flowlib.runtime.pool import KVStore

Tensors = Mapping[str, torch.Tensor]
Given = tuple[Tensors, Tensors, Mapping[str, Any]]
_BESIDE_FIELDS = {"p_field_scales": SCALES, "p_saturated": SATURATED}
"""Parameters of kernels with float8 summaries, and what a store calls them."""
SELECT = "flowlib.kernels.select:launch_select"
_PROGRAMS = 1024
"""Of a scoring kernel, about what a large GPU runs at once: they share the pages of every row, so that few of them have
nothing to do where rows are much shorter than the page table is wide."""
_MAX_TILES = 8  # a program: more would be a long tail where one row is much longer than the others


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Whether kernels on `device` can be launched while the one before them ends (sm_90 and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_options(pdl: bool, release: bool = False) -> dict[str, Any]:
    """Launch options of a generated kernel."""
    return load_function("flowlib.kernels.pdl:options")(pdl, release)


class TileKernel:
    """A generated kernel with the rule for its arguments.

    Args:
        stage: what it computes.
        source: text of the module it lies in.
        spec: the numbers it was written for.
        name: of the kernel; the stage's where not given.
    """

    def __init__(self, stage: TileStage, source: str, spec: Spec, name: str = "") -> None:
        self.stage = stage
        self.kernel = getattr(load_source(source), name or stage.name)
        self.tile = tile_pages(stage)
        self.spec = spec
        self.blocks = column_blocks(stage)[1]
        self.options = {"num_warps": num_warps(stage)}
        self._arguments = [_argument(name) for name in self.kernel.arg_names if name != "PDL"]

    def on_rows(
        self, tensors: Tensors, batch: Batch, pdl: bool = False, fields: Tensors | None = None, full_pages: int = 0,
        loc: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Runs it for the scored pages of every row of more than `full_pages` pages and ``spec.dense_below`` tokens.

        `tensors` are q, K, V and buffers by name, `fields` the fields (``None``: they are among `tensors`). A kernel of
        two stages takes `loc` for the other one.
        """
        rows = batch.size * self.spec.num_kv_heads
        step = {
            "page_table": batch.page_table, "seq_lens": batch.seq_lens,
            "full_pages": full_pages, "dense_below": self.spec.dense_below, "loc": loc, "n_rows": rows,
        }  # fmt: skip
        tiles = -(-batch.width // self.tile)
        sharing = max(1, min(tiles, max(-(-_PROGRAMS // rows), -(-tiles // _MAX_TILES))))
        sharing = self.blocks if self.stage.per_row else sharing
        grid = (rows + (0 if loc is None else loc.shape[0]), sharing)
        self._launch(grid, (tensors, tensors if fields is None else fields, step), pdl)

    def on_written(
        self, tensors: Tensors, loc: torch.Tensor, pdl: bool = False, fields: Tensors | None = None,
        release: bool = False,
    ) -> None:  # fmt: skip
        """Runs it for the pages whose last slot is in `loc`."""
        grid = (loc.shape[0], self.spec.num_kv_heads)
        self._launch(grid, (tensors, tensors if fields is None else fields, {"loc": loc}), pdl, release)

    def _launch(self, grid: tuple[int, int], given: Given, pdl: bool, release: bool = False) -> None:
        self.kernel[grid](*(find(given) for find in self._arguments), **self.options, **pdl_options(pdl, release))


def _argument(name: str) -> Callable[[Given], Any]:
    """What a kernel's parameter stands for.

    ``f_x`` is field x, ``p_x`` and ``w_x`` another tensor, ``s_x_<axis>`` a stride of one.
    """
    if name in _BESIDE_FIELDS:
        return lambda given: given[1][_BESIDE_FIELDS[name]]
    if name in ("p_page_table", "p_seq_lens", "p_loc"):
        return lambda given: given[2][name[2:]]
    if name in ("full_pages", "dense_below", "n_rows"):
        return lambda given: given[2][name]
    if name == "width":
        return lambda given: given[2]["page_table"].shape[1]
    if name == "s_page_table":
        return lambda given: given[2]["page_table"].stride(0)
    kind, rest = name.split("_", 1)
    if kind == "f":
        return lambda given: given[1][rest]
    if kind in ("p", "w"):
        return lambda given: given[0][rest]
    key, axis = rest.rsplit("_", 1)
    position = {"b": 0, "t": 0, "r": 0, "h": 1, "lane": -2}[axis]
    return lambda given: given[0][key].stride(position)


class Executor:
    """The loaded kernels of one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.full_pages = plan.full_pages
        program, spec = plan.program, plan.spec
        self.tiles = {s.name: TileKernel(s, program.source, spec) for s in program.stages if isinstance(s, TileStage)}
        name = joined_name(program.stages)
        first = next((s for s in program.step_stages if isinstance(s, TileStage)), None)
        self.joined = TileKernel(first, program.source, spec, name) if name and first else None
        self.segments = {s.name: load_function(s.op.kernel) for s in program.stages if isinstance(s, SegmentStage)}
        self.together = _together(program.step_stages)
        self.select = load_function(SELECT)
        self.attend = load_function(plan.attention_kernel)

    def update(self, store: KVStore, loc: torch.Tensor, release: bool = False) -> bool:
        """Fields of the pages whose last slot is in `loc`; whether a kernel was launched.

        With `release` the next kernel need not wait for it.
        """
        if self.plan.program.update is None or not loc.shape[0]:
            return False
        kernel = self.tiles[self.plan.program.update.name]
        kernel.on_written(store.given, loc, has_pdl(store.device), store.operands, release)
        return True

    def choose(
        self, q: torch.Tensor, store: KVStore, batch: Batch, out: StepOutput, loc: torch.Tensor | None = None
    ) -> None:
        """Scores and page lists; with `loc`, which needs :attr:`joined`, the fields of the pages it finishes, too."""
        spec, selection = self.plan.spec, self.plan.program.selection
        tensors = {**out.workspace, **store.given, "q": q}
        pdl = has_pdl(store.device)
        for i, stage in enumerate(self.plan.program.step_stages):
            if i == 0 and loc is not None and self.joined is not None:
                self.joined.on_rows(tensors, batch, pdl, store.operands, self.full_pages, loc)
            elif isinstance(stage, TileStage):
                self.tiles[stage.name].on_rows(tensors, batch, pdl, store.operands, self.full_pages)
            elif stage.name not in self.together:
                self._segment(stage, q, store, batch, out, pdl)
        top_k, ratio = selection.op.limits(spec)
        scores = None if selection.scores is None else out.workspace[selection.scores].flatten(1, 2)
        self.select(
            scores, batch.seq_lens, out.pages, out.lengths, num_kv_heads=spec.num_kv_heads, lanes=selection.lanes,
            page_size=spec.page_size, bos=spec.bos, eos=spec.eos, top_k=top_k, ratio_q16=ratio,
            full_pages=self.full_pages, dense_below=spec.dense_below,
            scored=scores is not None, width=batch.width, page_table=batch.page_table,
            physical=out.workspace["physical"], counts=out.workspace.get("counts"),
            candidates=out.workspace.get("candidates"), bins=out.workspace.get("bins"), pdl=pdl,
        )  # fmt: skip

    def _segment(
        self, stage: SegmentStage, q: torch.Tensor, store: KVStore, batch: Batch, out: StepOutput, pdl: bool
    ) -> None:
        spec, known = self.plan.spec, {}
        if stage.op.reads_rows:
            known["alibi_slopes"] = out.workspace.get("alibi_slopes")
        if stage.op.reads_queries:
            known |= {
                "q": q, "k": store.k, "page_table": batch.page_table, "scale": spec.softmax_scale,
                "k_scale": spec.k_scale,
            }  # fmt: skip
        if stage.op.scratch:
            own = f"{stage.name}:"
            known |= {name.removeprefix(own): x for name, x in out.workspace.items() if name.startswith(own)}
        for earlier, later, argument in self.together.values():
            if later == stage.name:
                known[argument] = self._target(earlier, out)
        self.segments[stage.name](
            *(out.workspace[source].flatten(1, 2) for source in stage.sources), self._target(stage, out),
            batch.seq_lens,
            num_kv_heads=spec.num_kv_heads, page_size=spec.page_size, bos=spec.bos, eos=spec.eos, pdl=pdl,
            **known, **stage.op.options(),
        )  # fmt: skip

    def _target(self, stage: SegmentStage, out: StepOutput) -> torch.Tensor:
        target = out.workspace[stage.target]
        if self.plan.program.buffers[stage.target].paged:
            return target.flatten(1, 2)
        return target.view(target.shape[0] * self.plan.spec.num_kv_heads, -1)

    def step(
        self, q: torch.Tensor, store: KVStore, batch: Batch, out: StepOutput, loc: torch.Tensor | None = None
    ) -> None:
        """Scores, page lists and attention; attention alone where the page table has room for short rows only.

        `loc` are the slots of the rows' own tokens, whose pages' fields are updated.
        """
        if batch.width <= self.plan.short_pages:
            self._step_short(q, store, batch, out, loc)
            return
        if loc is not None and (self.joined is None or batch.multi_token):
            self.update(store, loc)
            loc = None
        self.choose(q, store, batch, out, loc)
        self.attend_lists(q, store, batch, out, selected=True)

    def _step_short(
        self, q: torch.Tensor, store: KVStore, batch: Batch, out: StepOutput, loc: torch.Tensor | None
    ) -> None:
        """Attention to every page. It reads no field, so that over K and V it runs while the update before it does."""
        together = isinstance(self.plan.attention, Softmax) and not self.plan.spec.is_mla
        updated = loc is not None and self.update(store, loc, release=together)
        how = {"alongside": True} if together and updated else {}
        self.attend_lists(q, store, batch, out, every=True, **how)

    def attend_lists(
        self, q: torch.Tensor, store: KVStore, batch: Batch, out: StepOutput, every: bool = False, **how: bool
    ) -> None:
        """Attention over the page lists in `out`; with `every` over all pages, which the lists then say.

        `how` says which kernel has just been launched: ``selected`` or ``alongside``, see the launch functions.
        """
        lanes = out.pages.shape[1] // self.plan.spec.num_kv_heads
        physical = None if every else out.workspace["physical"]
        self._attend(q, store, batch, out, lanes, out.pages, physical=physical, every=every, **how)

    def attend_all(self, q: torch.Tensor, store: KVStore, batch: Batch, out: StepOutput) -> None:
        """Attention over all pages; no lists are written."""
        self._attend(q, store, batch, out, 1, None, every=True)

    def _attend(
        self, q: torch.Tensor, store: KVStore, batch: Batch, out: StepOutput, lanes: int, pages: torch.Tensor | None,
        **how: Any,
    ) -> None:  # fmt: skip
        spec, attention = self.plan.spec, self.plan.attention
        if isinstance(attention, Entmax):
            names, own = ("partial_o", "partial_mass"), arguments(self.plan, attention, out)
        else:
            names, own = ("partial_o", "partial_lse"), {"lse": out.lse}
        if not spec.is_mla:
            own["arrived"] = out.arrived
        self.attend(
            q, store.k, store.v, batch.page_table, batch.seq_lens, pages, None if pages is None else out.lengths,
            o=out.o, **own, **dict(zip(names, _partials(out), strict=True)),
            num_kv_heads=spec.num_kv_heads, group_size=spec.group_size, lanes=lanes, page_size=spec.page_size,
            scale=spec.softmax_scale, k_scale=spec.k_scale, v_scale=spec.v_scale,
            alibi_slopes=out.workspace.get("alibi_slopes"), num_splits=out.num_splits, pdl=has_pdl(store.device), **how,
        )  # fmt: skip


def _together(stages: Sequence[Stage]) -> dict[str, tuple[SegmentStage, str, str]]:
    """Segment stages whose results the launch of the next stage writes as well, by name: the stage, the name of the
    next one, and the argument for it."""
    found: dict[str, tuple[SegmentStage, str, str]] = {}
    for earlier, later in itertools.pairwise(stages):
        if not isinstance(earlier, SegmentStage) or not isinstance(later, SegmentStage):
            continue
        argument = later.op.also_gives(earlier.op) if earlier.sources == later.sources else ""
        if argument and earlier.target not in earlier.sources:
            found[earlier.name] = (earlier, later.name, argument)
    return found


def _partials(out: StepOutput) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Scratch of the splits: ``[rows, H_q, splits, Dv]`` and ``[rows, H_q, splits]``; none with one split."""
    if out.num_splits == 1:
        return None, None
    rows, heads, size = out.o.shape
    count = rows * heads * out.num_splits
    o = out.workspace["partial_o"][: count * size].view(rows, heads, out.num_splits, size)
    return o, out.workspace["partial_lse"][:count].view(rows, heads, out.num_splits)


def attend_everything(
    plan: Plan, q: torch.Tensor, store: KVStore, batch: Batch, attention: Normaliser
) -> StepOutput:
    """Exact attention over the whole row, o ``[rows, H_q, Dv]`` with lse or tau ``[rows, H_q]``, into fresh tensors."""
    from flowlib.runtime.plan import Plan

    whole = plan.spec.replace(max_pages=max(batch.width, 1), dense_below=2**31 - 1)
    dense = Plan(plan.program, whole, attention)
    out = dense.allocate(batch.size, batch.width, store.device, scores=False)
    if batch.size:
        Executor(dense).attend_all(q, store, batch, out)
    return out

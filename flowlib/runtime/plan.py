"""The plan: a flow profiled for a spec, ready to run in every mode."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

from flowlib.compiler.program import Program
from flowlib.core.attention import Entmax, Normaliser
from flowlib.core.errors import BackendError, BatchError, FormatError, OptionError, ShapeError
from flowlib.core.flow import vFlow
from flowlib.core.graph import Field
from flowlib.core.spec import Spec
from flowlib.runtime import entmax, reference, selection
from flowlib.runtime.batch import Batch
from flowlib.runtime.pool import KVStore, check_integers

IMPLEMENTATIONS = ("reference", "triton")
ATTEND = "flowlib.kernels.attend:launch_attend"
ATTEND_MLA = "flowlib.kernels.attend_mla:launch_attend_mla"
_ROW_MULTIPLE = 16  # columns: the selection reads rows of scores in vectors


@dataclass
class StepOutput:
    """What a step computes; ``rows`` is the batch's requests, or its query tokens.

    Attributes:
        o: ``[rows, H_q, Dv]``.
        lse: ``[rows, H_q]``, natural log of Σ exp(score) over the attended tokens; -inf for an empty row. ``None`` with
            entmax.
        pages: int32 ``[rows, H_kv or H_q, max_selected]``, logical pages, ascending, -1 padded.
        lengths: int32 ``[rows, H_kv or H_q]``, attended pages.
        raw_scores: fp32 ``[rows * H_kv, lanes, W]``, meaningful at scored pages only; ``None`` where nothing is scored.
        workspace: buffers between the kernels, by name.
        num_splits: programs that share one page list.
        arrived: int32, counts them off; zero before and after a step. ``None`` with one split, and over latents, whose
            splits a kernel of its own merges.
        tau: ``[rows, H_q]``, entmax's threshold of (alpha − 1) · score; -inf for an empty row. ``None`` with softmax,
            as are the next two.
        mass: ``[rows, H_q]``, the sum of the weights as tau gives them: 1, unless tau was only estimated; 0 for an
            empty row.
        certified: bool ``[rows, H_q]``: no page left out can hold a token with weight, so that o is entmax over the
            whole row. ``None`` where the flow gives no bound.
    """

    plan: Plan
    o: torch.Tensor
    lse: torch.Tensor | None
    pages: torch.Tensor
    lengths: torch.Tensor
    raw_scores: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    workspace: dict[str, torch.Tensor] = field(default_factory=dict)
    num_splits: int = 1
    arrived: torch.Tensor | None = None
    tau: torch.Tensor | None = None
    mass: torch.Tensor | None = None
    certified: torch.Tensor | None = None

    @property
    def scores(self) -> torch.Tensor | None:
        """``[rows, H_kv or H_q, W]``, NaN where a page was not scored; ``None`` where nothing is scored."""
        if self.raw_scores is None or self.seq_lens is None:
            return None
        spec, rows, width = self.plan.spec, self.pages.shape[0], self.raw_scores.shape[-1]
        logical = torch.arange(width, device=self.o.device)
        total = (self.seq_lens.to(torch.int64) + spec.page_size - 1) // spec.page_size
        scored = (logical >= spec.bos) & (logical < total[:, None] - spec.eos)
        scored &= ~self.plan.in_full(self.seq_lens)[:, None]
        return torch.where(scored[:, None, :], self.raw_scores.reshape(rows, -1, width), float("nan"))


class Plan:
    """A flow profiled for a spec.

    Attributes:
        flow: the copy of the flow that was profiled, its options resolved.
        spec: the numbers it was profiled for.
        program: graphs, stages, buffers and generated source.
        attention: how scores become weights: the flow's normaliser unless given.
    """

    def __init__(self, program: Program, spec: Spec, attention: Normaliser | None = None) -> None:
        self.program = program
        self.spec = spec
        self.attention: Normaliser = program.traced.flow.attention if attention is None else attention

    @property
    def flow(self) -> vFlow:
        """The profiled copy of the flow."""
        return self.program.traced.flow

    @property
    def fields(self) -> dict[str, Field]:
        """The flow's fields by name."""
        return self.program.traced.fields

    @property
    def state_fields(self) -> tuple[str, ...]:
        """Names of the fields that carry something across decode steps."""
        return tuple(f.name for f in self.fields.values() if f.kind == "state")

    @property
    def scaled_fields(self) -> tuple[str, ...]:
        """Names of the scaled float8 summaries."""
        return tuple(f.name for f in self.fields.values() if f.rounding)

    @property
    def field_bytes_per_page(self) -> int:
        """Bytes of all fields of one page of one layer, all kv heads."""
        return self.spec.num_kv_heads * sum(f.nbytes for f in self.fields.values())

    @property
    def storage(self) -> dict[str, tuple[object, ...]]:
        """What a pool must hold: the sizes and dtypes of K, V and the fields."""
        spec = self.spec
        given: dict[str, tuple[object, ...]] = {
            "k": (spec.page_size, spec.num_kv_heads, spec.head_dim, spec.kv_dtype, spec.k_scale),
            "v": (spec.page_size, spec.num_kv_heads, spec.dv, spec.kv_dtype, spec.v_scale),
        }
        if spec.is_mla:
            given = {"latent": (spec.page_size, spec.head_dim, spec.dv, spec.kv_dtype, spec.k_scale)}
        return given | {f.name: (*f.shape, f.dtype) + (("scaled",) if f.rounding else ()) for f in self.fields.values()}

    @functools.cached_property
    def full_pages(self) -> int:
        """Rows of at most so many pages are within the budget and attended in full, unscored; 0 where a flow with state
        must score them, or one whose scores can be -inf or NaN."""
        return self.program.full_pages(self.spec)

    @property
    def short_pages(self) -> int:
        """Over a page table of at most so many columns every row is attended in full, and nothing is scored."""
        return max(self.full_pages, self.spec.dense_below // self.spec.page_size)

    def in_full(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """Which rows ``[rows]`` are attended in full without being scored, for being within the budget or so short."""
        size, spec = self.spec.page_size, self.spec
        pages = torch.div(seq_lens.to(torch.int64) + size - 1, size, rounding_mode="floor")
        return (pages <= self.full_pages) | (seq_lens <= spec.dense_below)

    @property
    def attention_kernel(self) -> str:
        """Import string of the function that launches attention."""
        if isinstance(self.attention, Entmax):
            return entmax.LAUNCH
        return ATTEND_MLA if self.spec.is_mla else ATTEND

    @property
    def lanes(self) -> int:
        """Page lists per kv head: 1, or the group size where each query head selects for itself."""
        return self.program.selection.lanes

    @property
    def max_selected(self) -> int:
        """Most pages in one page list."""
        spec, op = self.spec, self.program.selection.op
        budget = op.budget(spec, spec.max_pages) + spec.bos + spec.eos
        return min(spec.max_pages, max(budget, -(-spec.dense_below // spec.page_size)))

    @functools.cached_property
    def _executor(self):  # noqa: ANN202  (an Executor; imported late, it needs Triton)
        from flowlib.runtime.execute import Executor

        return Executor(self)

    def __str__(self) -> str:
        from flowlib.runtime.describe import describe

        return describe(self)

    def check_impl(self, impl: str, device: torch.device) -> None:
        """Raises OptionError for an unknown `impl`, BackendError if it can't run on `device`."""
        if impl not in IMPLEMENTATIONS:
            raise OptionError(f"impl is {impl!r}, expected 'reference' or 'triton'")
        if impl == "triton" and device.type == "cpu":
            from flowlib.runtime.interpreter import install

            install()
        elif impl == "triton" and device.type != "cuda":
            raise BackendError(f"impl='triton' on {device.type} tensors: expected cuda, or CPU tensors interpreted")

    def prepare(self, impl: str, device: torch.device) -> None:
        """Checks that `impl` runs on `device` and loads its kernels, so that nothing later can fail for that."""
        self.check_impl(impl, device)
        if impl == "triton":
            self._executor  # noqa: B018  (loaded here, used later)

    def update(self, store: KVStore, loc: torch.Tensor, impl: str = "reference") -> None:
        """Runs ``forward_cache`` for the pages whose last slot is in `loc`, their K and V stored; copies nothing.

        Args:
            store: the pool.
            loc: int64 ``[T]`` token slots, contiguous; -1, as padding has it, writes nothing.
            impl: ``"reference"`` or ``"triton"``.

        Raises:
            FormatError, BatchError, OptionError, BackendError: before anything runs.
        """
        self._check_store("update", store)
        self.check_impl(impl, store.device)
        check_integers("update: loc", loc, "T", store.num_pages * self.spec.page_size, store.device, lowest=-1)
        if not loc.is_contiguous():
            raise BatchError(f"update: loc has stride {loc.stride(0)}, expected 1; pass loc.contiguous()")
        if impl == "triton":
            self._executor.update(store, loc)
        else:
            reference.update_fields(self.program.traced.cache, store, loc)

    def step(
        self, q: torch.Tensor, store: KVStore, batch: Batch, impl: str = "reference", dtype: torch.dtype | None = None
    ) -> StepOutput:
        """One decode step into fresh tensors; K and V of the query tokens are stored already.

        Args:
            q: ``[rows, H_q, D]``, a row per request, or per query token with ``q_lens``.
            store: the pool.
            batch: page table and lengths.
            impl: ``"reference"`` or ``"triton"``.
            dtype: compute and output dtype of the reference; ``None`` computes in fp32 and returns q's dtype.

        Raises:
            BatchError, ShapeError, FormatError, OptionError, BackendError: before anything runs.
        """
        self.check_step(q, store, batch)
        self.check_impl(impl, store.device)
        if impl == "triton":
            if dtype is not None:
                raise OptionError("step: dtype is for impl='reference'; impl='triton' accumulates in fp32")
            out = self.allocate(batch.size, batch.width, store.device)
            self.launch(q, store, batch, out)
            return out
        done = reference.step(self, q, store, batch, dtype or torch.float32)
        o = done.o if dtype is not None else done.o.to(q.dtype)
        return StepOutput(
            self, o, done.lse, done.pages, done.lengths, reference.widened(done.scores, batch), batch.seq_lens,
            tau=done.tau, mass=done.mass, certified=done.certified,
        )  # fmt: skip

    def allocate(self, rows: int, width: int, device: str | torch.device, scores: bool = True) -> StepOutput:
        """Outputs and workspace of :meth:`launch` for `rows` rows and a page table of `width` columns.

        Without `scores` the buffers of scoring are left out: enough to attend given page lists.
        """
        spec, heads = self.spec, self.spec.num_kv_heads
        lists = heads * self.lanes

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        room = {self.program.selection.scores: -(-width // _ROW_MULTIPLE) * _ROW_MULTIPLE}
        work = {
            n: empty(rows * heads, *b.shape, room.get(n, width))[..., :width]
            if b.paged
            else empty(rows, heads * b.shape[0], b.shape[1])
            for n, b in self.program.buffers.items()
            if scores
        }
        if scores:
            work |= selection.plan_scratch(self.program, spec, (rows, lists), width, device)
        work["physical"] = empty(rows, lists, self.max_selected, dtype=torch.int32)
        splits = [self._splits(n) for n in range(1, rows + 1)]
        partials = max((n * s for n, s in enumerate(splits, start=1) if s > 1), default=0)
        if partials:
            work["partial_o"] = empty(partials * spec.num_heads * spec.dv)
            work["partial_lse"] = empty(partials * spec.num_heads)
        if sums := isinstance(self.attention, Entmax):
            work |= entmax.scratch(self, rows, device)
        if spec.alibi_slopes is not None:
            work["alibi_slopes"] = torch.tensor(spec.alibi_slopes, dtype=torch.float32, device=device)
        whole = StepOutput(
            self,
            o=empty(rows, spec.num_heads, spec.dv, dtype=spec.field_dtype),
            lse=None if sums else empty(rows, spec.num_heads),
            pages=empty(rows, lists, self.max_selected, dtype=torch.int32),
            lengths=empty(rows, lists, dtype=torch.int32),
            workspace=work,
            arrived=torch.zeros(rows * spec.num_heads, dtype=torch.int32, device=device)
            if partials and not spec.is_mla
            else None,
            tau=empty(rows, spec.num_heads) if sums else None,
            mass=empty(rows, spec.num_heads) if sums else None,
            certified=empty(rows, spec.num_heads, dtype=torch.bool) if "bound" in self.program.hints else None,
        )
        return self.narrowed(whole, rows)

    def narrowed(self, whole: StepOutput, rows: int) -> StepOutput:
        """Views of what :meth:`allocate` made, for at most as many `rows`: steps that never overlap can share it."""
        spec, splits = self.spec, self._splits(rows)
        work = dict(whole.workspace)
        for name, buffer in self.program.buffers.items():
            if name in work:
                work[name] = work[name][: rows * (spec.num_kv_heads if buffer.paged else 1)]
        work["physical"] = work["physical"][:rows]
        scored = self.program.selection.scores
        return StepOutput(
            self,
            whole.o[:rows],
            None if whole.lse is None else whole.lse[:rows],
            whole.pages[:rows],
            whole.lengths[:rows],
            raw_scores=work[scored].flatten(1, 2) if scored in work else None,
            workspace=work,
            num_splits=splits,
            arrived=whole.arrived,
            tau=None if whole.tau is None else whole.tau[:rows],
            mass=None if whole.mass is None else whole.mass[:rows],
            certified=None if whole.certified is None else whole.certified[:rows],
        )

    def _splits(self, rows: int) -> int:
        spec, lists = self.spec, rows * self.spec.num_kv_heads * self.lanes
        if spec.is_mla:
            from flowlib.kernels import attend_mla

            heads, itemsize = spec.group_size if self.lanes == 1 else 1, spec.kv_dtype.itemsize
            return attend_mla.num_splits(self.max_selected, spec.page_size, lists, heads, itemsize)
        from flowlib.kernels.attend import num_splits

        more = (entmax.PROGRAMS,) if isinstance(self.attention, Entmax) else ()
        return num_splits(self.max_selected, spec.page_size, lists, *more)

    def launch(
        self, q: torch.Tensor, store: KVStore, batch: Batch, out: StepOutput, loc: torch.Tensor | None = None
    ) -> None:
        """The step as Triton kernels into `out`, unchecked: allocates nothing, never waits, capturable.

        With `loc`, int64 slots of the tokens this step is for (-1 for padding), it is ``update(store, loc)`` and the
        step in fewer launches: no token's page but the last of its own row is finished by them.
        """
        out.seq_lens = batch.seq_lens
        if batch.size:
            self._executor.step(q, store, batch, out, loc)

    def check_step(self, q: torch.Tensor, store: KVStore, batch: Batch) -> None:
        """Raises if queries, pool and batch do not fit the plan. Lengths and page ids are looked at on the CPU only."""
        self.check_inputs("step", q, store, batch)
        if batch.multi_token and self.state_fields:
            raise BatchError(
                f"step: q_lens with state field {self.state_fields[0]!r}: state carries from one step to the next, "
                "so a request has one query token per step"
            )

    def check_inputs(self, what: str, q: torch.Tensor, store: KVStore, batch: Batch) -> None:
        """As :meth:`check_step` for a call named `what` that leaves the flow's state alone."""
        self._check_store(what, store)
        if not isinstance(batch, Batch):
            raise FormatError(
                f"{what}: 'batch' is {type(batch).__name__}, expected flowlib.Batch(page_table, seq_lens)"
            )
        self._check_queries(what, q, batch)
        if len({q.device, store.device, batch.device}) > 1:
            raise BatchError(f"{what}: q is on {q.device}, the pool on {store.device}, the batch on {batch.device}")
        if batch.device.type == "cpu" and batch.size:
            self._check_rows(what, store, batch)

    def _check_queries(self, what: str, q: torch.Tensor, batch: Batch) -> None:
        spec = self.spec
        wanted = (batch.size, spec.num_heads, spec.head_dim)
        if not isinstance(q, torch.Tensor):
            raise FormatError(f"{what}: 'q' is {type(q).__name__}, expected a tensor {list(wanted)} [rows, H_q, D]")
        if tuple(q.shape) != wanted:
            raise ShapeError(f"{what}: 'q' is {list(q.shape)}, expected {list(wanted)} [rows, H_q, D]")
        if q.dtype is not spec.field_dtype:
            raise FormatError(f"{what}: 'q' is {q.dtype}, expected {spec.field_dtype} to match the spec's kv_dtype")
        if q.stride(-1) != 1 and spec.head_dim != 1:
            raise FormatError(
                f"{what}: the last axis of 'q' has stride {q.stride(-1)}, expected 1; pass q.contiguous()"
            )

    def _check_store(self, what: str, store: KVStore) -> None:
        if not isinstance(store, KVStore):
            raise FormatError(
                f"{what}: the pool is {type(store).__name__}, expected flowlib.PagedPool(plan, num_pages) or a KVStore"
            )
        if store.plan is not self and store.plan.storage != self.storage:
            raise BatchError(
                f"{what}: the pool holds {store.plan.storage}, this plan needs {self.storage}; "
                "make it with PagedPool(plan, ...)"
            )

    def _check_rows(self, what: str, store: KVStore, batch: Batch) -> None:
        counts = reference.num_pages_of(batch, self.spec)
        limit = min(batch.width, self.spec.max_pages)
        if int(counts.max()) > limit:
            row = int(counts.argmax())
            bound = "columns of the page table" if limit == batch.width else "max_pages of the spec"
            raise BatchError(
                f"{what}: row {row} has {int(batch.seq_lens[row])} tokens = {int(counts[row])} pages, "
                f"more than the {limit} {bound}"
            )
        owned = torch.arange(batch.width) < counts[:, None]
        ids = batch.page_table[owned]
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= store.num_pages):
            bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise BatchError(f"{what}: page_table has page {bad}, expected from 0 to {store.num_pages - 1}")

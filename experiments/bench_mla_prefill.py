"""Prefill over a cached context: every variant through the gate, then its time, whole and by stages."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from bench_gate import Verdict
from bench_mla_counts import Work, absorbed_work, chunked_work, floor_us, total
from bench_mla_gate import judge_outputs, raised
from bench_mla_peers import AbsorbedFA3, AbsorbedFlashInfer, SGLangPrefix, check_compiled
from bench_mla_problem import PrefillProblem, Sample, prefill_problem, samples
from bench_mla_shapes import PrefillShape
from bench_mla_variants import AbsorbedDecode, Call, Chunked, Variant
from bench_peers import FAILURES, short
from bench_pools import needed
from bench_timing import Timed, capture, replay
from triton.errors import TritonError

from flowlib.errors import FlowlibError

ATTENTIONS = ("triton", "flashinfer")
_MAX_COPIES = 64
_MAX_CACHE_BYTES = 8 << 30
_SAMPLES = 3
Maker = Callable[[PrefillProblem], Variant]


@dataclass(frozen=True)
class PrefillRow:
    """A variant on a shape; microseconds a layer.

    Attributes:
        part: ``"prefill"`` or ``"schedule"``.
        shape: the sizes.
        name, absorbed, own: the variant's.
        chunks: passes over the workspace; 0 where there are none.
        whole: from a CUDA graph, so that the host takes no part in it.
        eager: wall clock of calls one after the other without a graph, as prefill is served.
        stages: by name, from graphs of their own.
        work: bytes and operations of the stages.
        read, matmul: bytes and operations a second, measured in the same run.
        copies: caches that take turns.
    """

    part: str
    shape: PrefillShape
    name: str
    absorbed: bool
    own: bool
    chunks: int
    whole: Timed
    eager: float
    stages: Mapping[str, Timed]
    work: Mapping[str, Work]
    read: float
    matmul: float
    copies: int

    @property
    def floor_us(self) -> float:
        """The stages' floors, one after the other."""
        return floor_us(self.work, self.read, self.matmul)

    @property
    def floor_ratio(self) -> float:
        """The time over the floor."""
        return self.whole.us / self.floor_us

    @property
    def moved(self) -> Work:
        """Bytes and operations of all stages."""
        return total(self.work)


def prefill_makers(shape: PrefillShape, cuda: bool, compile_missing: bool) -> dict[str, Maker]:
    """Makers of every variant, by a name for notes."""
    chunked = {f"chunked, {a}": functools.partial(_chunked, a, "packed", compile_missing) for a in ATTENTIONS}
    makers: dict[str, Maker] = {**chunked, "absorbed, flowlib decode kernel": AbsorbedDecode}
    if cuda:
        makers["absorbed, FlashInfer"] = lambda p: AbsorbedFlashInfer(p, compile_missing)
        makers["absorbed, FA3"] = AbsorbedFA3
        for library in ("FlashInfer", "FA3"):
            for one_shot in (False, True):
                name = f"SGLang {'one shot' if one_shot else 'chunks'}, {library}"
                makers[name] = functools.partial(
                    SGLangPrefix, library=library, one_shot=one_shot, compile_missing=compile_missing
                )
    return makers


def schedule_makers(shape: PrefillShape, cuda: bool, compile_missing: bool) -> dict[str, Maker]:
    """Both schedules with every attention; SGLang's even chunks beside them."""
    makers: dict[str, Maker] = {
        f"chunked, {a}, {s}": functools.partial(_chunked, a, s, compile_missing)
        for a in ATTENTIONS for s in ("packed", "even")
    }  # fmt: skip
    if cuda:
        for library in ("FlashInfer", "FA3"):
            makers[f"SGLang chunks, {library}"] = functools.partial(
                SGLangPrefix, library=library, one_shot=False, compile_missing=compile_missing
            )
    return makers


def _chunked(attention: str, schedule: str, compile_missing: bool, problem: PrefillProblem) -> Variant:
    """A loop whose attention can run here. Raises BackendError, RuntimeError with the reason otherwise."""
    from flowlib import mla

    sizes = problem.shape.sizes
    mla.resolve_attention(attention, "triton", torch.bfloat16, (sizes.key, sizes.dv), problem.device)
    if attention == "flashinfer":
        check_compiled(compile_missing, ragged=True)
    return Chunked(problem, attention, schedule)


def copies_of(shape: PrefillShape, l2: int) -> int:
    """Caches that take turns, so that eight times the L2 is moved between two uses of one, as far as it goes."""
    least = min(total(chunked_work(shape)).bytes, total(absorbed_work(shape)).bytes)
    size = sum(shape.pages) * shape.page * shape.sizes.latent * 2
    return max(1, min(needed(least, l2), _MAX_COPIES, _MAX_CACHE_BYTES // size))


@dataclass
class PrefillBench:
    """Gates and measures the variants of shapes.

    Args:
        device: ``cuda``, or ``cpu`` for the gate alone.
        seconds: of replays per number.
        l2: bytes of the L2.
        rates: bytes a second read and operations a second, or None for the gate alone.
        compile_missing: let FlashInfer compile.
        note: called with each note.
        without: libraries whose kernels are left out.

    Attributes:
        verdicts: of the gate, so far.
        failed: whether one of flowlib's variants could not be timed.
    """

    device: str
    seconds: float
    l2: int
    rates: tuple[float, float] | None
    compile_missing: bool
    note: Callable[[str], None]
    without: tuple[str, ...] = ()
    verdicts: list[Verdict] = field(default_factory=list)
    failed: bool = False

    def run(self, part: str, shape: PrefillShape) -> Iterator[PrefillRow]:
        """Rows of a shape; a red verdict on one of flowlib's variants ends it."""
        cuda = self.rates is not None
        problem = prefill_problem(shape, self.device, copies_of(shape, self.l2) if cuda else 1)
        found = samples(problem, problem.caches[0])
        makers = (prefill_makers if part == "prefill" else schedule_makers)(
            shape, self.device != "cpu", self.compile_missing
        )
        for name, make in makers.items():
            if any(name.endswith(f" {library}") for library in self.without):
                self.note(f"{name} is not measured: left out by --without")
                continue
            try:
                variant = make(problem)
            except (*FAILURES, FlowlibError) as error:
                self.note(f"{name} is not measured at {_where(shape)}: {short(error)}")
                continue
            if self._passes(variant, problem, found) and self.rates is not None:
                yield from self._measured(part, variant, problem, self.rates)
            if any(not v.ok for v in self.verdicts):
                return
            del variant
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()

    def _measured(
        self, part: str, variant: Variant, problem: PrefillProblem, rates: tuple[float, float]
    ) -> Iterator[PrefillRow]:
        """A variant's row; none, and a note, where it cannot be timed: for want of memory, or in a graph."""
        try:
            yield measure(part, variant, problem, self.seconds, rates)
        except (*FAILURES, TritonError) as error:
            self.failed |= variant.own
            self.note(f"{variant.name} is not timed at {_where(problem.shape)}: {short(error)}")

    def _passes(self, variant: Variant, problem: PrefillProblem, found: list[Sample]) -> bool:
        """Whether a variant's sampled rows are right; another library's wrong ones are noted and not timed."""
        where = _where(problem.shape)
        try:
            o, lse = variant.run(problem.caches[0])
            verdicts = judge_outputs(variant.name, where, found, o, lse, variant.absorbed)
        except (*FAILURES, FlowlibError, TritonError) as error:
            verdicts = [raised(variant.name, where, error)]
        wrong = [v for v in verdicts if not v.ok]
        if variant.own:
            self.verdicts += verdicts
        elif wrong:
            worst = max(wrong, key=lambda v: v.error)
            told = worst.note or f"{worst.stage} off by {worst.error:.2g}, expected at most {worst.tolerance:.2g}"
            self.note(f"{variant.name} is not measured at {where}: {told}")
        return not wrong


def _where(shape: PrefillShape) -> str:
    return f"{shape.label}, {shape.heads} heads, workspace {shape.workspace:,}"


def measure(
    part: str, variant: Variant, problem: PrefillProblem, seconds: float, rates: tuple[float, float]
) -> PrefillRow:
    """A variant's row: whole and stages from graphs in which the caches take turns."""
    whole = _timed(variant.run, problem, seconds)
    eager = _eager(variant.run, problem, seconds)
    stages = {name: _timed(call, problem, seconds / 2) for name, call in variant.stages().items()}
    chunks = variant.context.num_chunks if isinstance(variant, Chunked) else 0
    if isinstance(variant, SGLangPrefix):
        chunks = 0 if variant.one_shot else len(variant.chunks)
    return PrefillRow(
        part, problem.shape, variant.name, variant.absorbed, variant.own, chunks, whole, eager, stages, variant.work(),
        *rates, len(problem.caches),
    )  # fmt: skip


def _timed(call: Call, problem: PrefillProblem, seconds: float) -> Timed:
    calls = [functools.partial(call, cache) for cache in problem.caches]
    return replay([capture(calls, torch.cuda.graph_pool_handle())], len(calls), seconds, _SAMPLES)


def _eager(call: Call, problem: PrefillProblem, seconds: float) -> float:
    """Microseconds of a call by the clock on the wall, the host queueing ahead: the better of two rounds."""
    best, count = float("inf"), 2
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(count):
            call(problem.caches[i % len(problem.caches)])
        torch.cuda.synchronize()
        spent = (time.perf_counter() - start) / count
        best, count = min(best, spent), max(2, min(100, int(seconds / spent)))
    return 1e6 * best

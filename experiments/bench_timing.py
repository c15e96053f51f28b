"""Times of captured work, and the bandwidths they are held against. Everything here needs a CUDA GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

MAX_SAMPLES = 400
_READ_BLOCK = 8192
_BANDWIDTH_BYTES = 2 << 30


@dataclass(frozen=True)
class Timed:
    """Microseconds of one unit (a layer, or a launch): the median over replays, and the 10th and 90th percentile."""

    us: float
    low: float
    high: float
    samples: int

    def shared(self, by: int) -> Timed:
        """The share of one of `by` layers."""
        return Timed(self.us / by, self.low / by, self.high / by, self.samples)

    @property
    def spread(self) -> float:
        """Half the distance of the percentiles as a share of the median."""
        return (self.high - self.low) / 2 / self.us if self.us else 0.0


def capture(calls: Sequence[Callable[[], object]], pool: Any, first: Callable[[], object] | None = None) -> Any:
    """A CUDA graph of `first` and then `calls`, each call run before the capture if it is among the first two or last.

    Args:
        calls: launches; they allocate from the graph's pool if at all.
        pool: ``torch.cuda.graph_pool_handle()``, shared by graphs that never run at once.
        first: what the calls depend on.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        if first is not None:
            first()
        for call in (*calls[:2], calls[-1]):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        if first is not None:
            first()
        for call in calls:
            call()
    return graph


def replay(graphs: Sequence[Any], units: int, seconds: float, least: int = 8) -> Timed:
    """Replays graphs of `units` units each in turn for about `seconds`; the host queues all of them ahead.

    Args:
        graphs: replayed one after the other.
        units: layers or launches in each.
        seconds: device time to spend.
        least: fewest samples, whatever they take.
    """
    for graph in graphs:
        graph.replay()
    torch.cuda.synchronize()
    guess = sum(_durations(graphs, 2 * len(graphs))) / 2 / 1e3
    rounds = int(max(1, min(seconds / max(guess, 1e-6), MAX_SAMPLES // len(graphs))))
    count = max(rounds * len(graphs), least) + 1
    times = sorted(1e3 * t / units for t in _durations(graphs, count)[1:])
    pick = [times[min(len(times) - 1, int(share * len(times)))] for share in (0.5, 0.1, 0.9)]
    return Timed(pick[0], pick[1], pick[2], len(times))


def _durations(graphs: Sequence[Any], count: int) -> list[float]:
    """Milliseconds of `count` replays in turn, queued without a wait."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for i in range(count):
        graphs[i % len(graphs)].replay()
        events[i + 1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


@triton.jit
def read_kernel(p_x, p_sums, n, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201
    """Sums BLOCK int32 values a program; the sum is stored, so that no load is dropped."""
    i_block = tl.program_id(0).to(tl.int64)
    o = i_block * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_sums + i_block, tl.sum(tl.load(p_x + o, mask=o < n, other=0), 0))


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second: a large read (the better of two kernels) and a large copy, counted both ways."""

    read: float
    copy: float


def whole_words(memory: torch.Tensor, limit: int) -> torch.Tensor:
    """The first bytes of a contiguous vector as int32, at most `limit` of them; what fills no word is left out."""
    count = min(limit, memory.numel() * memory.element_size()) // 4
    return memory[: count * 4 // memory.element_size()].view(torch.int32)


def measure_bandwidth(memory: torch.Tensor, seconds: float) -> Bandwidth:
    """Reads and copies up to 2 GiB of `memory` (a contiguous vector on the GPU), which is left as it was."""
    values = whole_words(memory, _BANDWIDTH_BYTES)
    programs = -(-values.numel() // _READ_BLOCK)
    sums = torch.empty(programs, dtype=torch.int32, device=memory.device)
    half = values[: values.numel() // 2]
    target, total = torch.empty_like(half), torch.empty((), dtype=torch.float32, device=memory.device)
    floats = memory[: 4 * values.numel() // memory.element_size()]
    pool = torch.cuda.graph_pool_handle()

    kernel: Any = read_kernel

    def read() -> None:
        kernel[(programs,)](values, sums, values.numel(), BLOCK=_READ_BLOCK, num_warps=8)

    def library() -> None:
        torch.sum(floats, dim=0, dtype=torch.float32, out=total)

    def copy() -> None:
        target.copy_(half)

    times = [replay([capture([call] * 4, pool)], 4, seconds).us for call in (read, library, copy)]
    size = 4e6 * values.numel()
    return Bandwidth(size / min(times[:2]), size / times[2])


def measure_matmul(device: str | torch.device, seconds: float, size: int = 8192) -> float:
    """Floating-point operations a second of a large bf16 matrix product on random numbers, by torch's library."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(a)
    pool = torch.cuda.graph_pool_handle()
    found = replay([capture([lambda: torch.mm(a, b, out=out)] * 4, pool)], 4, seconds)
    return 2e6 * size**3 / found.us

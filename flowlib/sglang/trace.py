"""The trace: what each decode step attended to, as JSON lines, counted from what the step returned.

One line per decode step::

    {"step": 7, "rids": ["a1"], "seq_lens": [2011], "cached": [126], "trace_seconds": 0.004,
     "layers": {"0": {"attended": [[10, 10, 10]], "mass": [[0.93, ...]], "pages": [[[0, 4, ..., 125], ...]]}}}

``cached`` has the pages of each row and ``attended`` those attended to, by row and kv head (or query head, where a
flow chooses per query head). ``pages`` and ``mass`` are written when asked for: the logical page ids, and by row and
query head the share of the dense attention mass that the chosen pages hold, ``exp(lse_sparse - lse_dense)``. Dense
layers have ``"dense": true``. ``trace_seconds`` is the time the step spent on all this.
"""

import json
import time
from pathlib import Path
from typing import IO, Any

import torch

import flowlib
from flowlib.core.errors import OptionError
from flowlib.sglang.options import TraceConfig
from flowlib.sglang.setup import FlowSetup


class Trace:
    """Writes the trace of one rank.

    Args:
        config: where to write, and what.
        file: the open file; a line is written and flushed when the step's last layer is recorded.
        page_size: tokens per page.
        num_layers: layers of this rank.
        impl: how the dense answer for ``mass`` is computed.
    """

    def __init__(self, config: TraceConfig, file: IO[str], page_size: int, num_layers: int, impl: str) -> None:
        self.config = config
        self.page_size = page_size
        self.num_layers = num_layers
        self.impl = impl
        self._file = file
        self._step = -1
        self._line: dict[str, Any] = {}

    def begin(self, forward_batch: Any) -> None:
        """A new decode step begins."""
        self._step += 1
        lengths = forward_batch.seq_lens.tolist()
        cached = [-(-length // self.page_size) for length in lengths]
        head = {"step": self._step, "rids": forward_batch.rids, "seq_lens": lengths, "cached": cached}
        self._line = head | {"trace_seconds": 0.0, "layers": {}}

    def record(self, layer_id: int, q: torch.Tensor, store: Any, batch: Any, out: Any) -> None:
        """One sparse layer of the step has attended; `out` is its answer."""
        begin = time.perf_counter()
        entry = {"attended": out.lengths.tolist()} | self._extras(q, store, batch, out)
        self._line["trace_seconds"] += time.perf_counter() - begin
        self._add(layer_id, entry)

    def record_dense(self, layer_id: int) -> None:
        """One dense layer of the step has attended to every page."""
        self._add(layer_id, {"attended": [[pages] for pages in self._line["cached"]], "dense": True})

    def _add(self, layer_id: int, entry: dict[str, Any]) -> None:
        self._line["layers"][str(layer_id)] = entry
        if len(self._line["layers"]) == self.num_layers:
            self._file.write(json.dumps(self._line) + "\n")
            self._file.flush()

    def _extras(self, q: torch.Tensor, store: Any, batch: Any, out: Any) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self.config.pages:
            lists, lengths = out.pages.tolist(), out.lengths.tolist()
            extras["pages"] = [
                [pages[:n] for pages, n in zip(row, counts, strict=True)]
                for row, counts in zip(lists, lengths, strict=True)
            ]
        if self.config.mass:
            dense = flowlib.dense(q, store, batch, impl=self.impl)
            if out.lse is None or dense.lse is None:
                raise OptionError("--flow-config: trace.mass needs a softmax flow, this one's attention has no lse")
            extras["mass"] = torch.exp(out.lse.double() - dense.lse.double()).tolist()
        return extras


def open_trace(setup: FlowSetup) -> Trace | None:
    """The trace of this rank when the configuration asks for one.

    Raises:
        OptionError: the file can't be written.
    """
    config = setup.config.trace
    if config is None:
        return None
    path = Path(config.path)
    ranks, rank = _ranks()
    if ranks > 1:
        path = path.with_name(f"{path.name}.rank{rank}")
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--flow-config: trace can't be written to {str(path)!r}: {error.strerror}") from error
    return Trace(config, file, setup.facts.page_size, setup.facts.num_layers, setup.impl)


def _ranks() -> tuple[int, int]:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.attn_tp_size, parallel.attn_tp_rank

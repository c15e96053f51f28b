"""The batch of one decode step, shared by all layers: lengths and page table, from SGLang's slots.

A page is ``page_size`` slots in a row, so a request's page table is every ``page_size``-th of its slots, divided by it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import flowlib


@dataclass
class Step:
    """One decode step.

    Args:
        batch: lengths and page table of the requests.
        width: columns of the page table.
        outputs: the buffers that :meth:`output` made, by plan; one set serves all layers of the plan.
        whole: gives the buffers of the largest graph, which smaller ones take views of; ``None`` for own ones.
    """

    batch: Any
    width: int
    outputs: dict[int, Any] = field(default_factory=dict)
    whole: Callable[[Any], Any] | None = None

    def output(self, plan: Any) -> Any:
        """Buffers for ``plan.launch``; made once per plan, so that every layer and every replay uses the same."""
        if id(plan) not in self.outputs:
            table = self.batch.page_table
            rows = table.shape[0]
            if self.whole is None:
                self.outputs[id(plan)] = plan.allocate(rows, self.width, table.device)
            else:
                self.outputs[id(plan)] = plan.narrowed(self.whole(plan), rows)
        return self.outputs[id(plan)]


def torch_step(req_to_token: torch.Tensor, forward_batch: Any, page_size: int) -> Step:
    """A step planned with torch, for the reference; the widest row is read on the host.

    Args:
        req_to_token: SGLang's slots, int32 ``[requests, context]``.
        forward_batch: SGLang's batch; ``seq_lens`` count the token of this step.
        page_size: slots per page.
    """
    longest = int(forward_batch.seq_lens.max()) if forward_batch.seq_lens.numel() else 0
    slots = req_to_token[:, : max(longest, 1) : page_size][forward_batch.req_pool_indices]
    table = torch.div(slots, page_size, rounding_mode="floor").to(torch.int32)
    return Step(flowlib.Batch(table, forward_batch.seq_lens.to(torch.int32)), table.shape[1])


class KernelSteps:
    """Steps planned by a kernel, without a look at the lengths on the host; their buffers can be static.

    Args:
        req_to_token: SGLang's slots, int32 ``[requests, context]``.
        max_pages: columns of the page table.
        page_size: slots per page.
        short_pages: columns of the page table of a short batch's graph.
    """

    def __init__(self, req_to_token: torch.Tensor, max_pages: int, page_size: int, short_pages: int) -> None:
        self.req_to_token = req_to_token
        self.max_pages = max_pages
        self.page_size = page_size
        self.short_pages = short_pages
        self._graph_steps: dict[tuple[int, bool], Step] = {}
        self._whole: dict[int, Any] = {}

    def allocate(self, max_batch: int) -> None:
        """Makes the static buffers of the CUDA graphs, for at most `max_batch` requests."""
        device = self.req_to_token.device
        self._table = torch.zeros((max_batch, self.max_pages), dtype=torch.int32, device=device)
        self._short_table = torch.zeros((max_batch, self.short_pages), dtype=torch.int32, device=device)
        self._lengths = torch.zeros(max_batch, dtype=torch.int32, device=device)

    def graph_step(self, batch_size: int, short: bool = False) -> Step:
        """The step that the graph of this batch size captures, or that of its short batches; one object for each."""
        key = (batch_size, short)
        if key not in self._graph_steps:
            table = self._short_table if short else self._table
            batch = flowlib.Batch(table[:batch_size], self._lengths[:batch_size])
            self._graph_steps[key] = Step(batch, table.shape[1], whole=self._largest)
        return self._graph_steps[key]

    def _largest(self, plan: Any) -> Any:
        """The plan's buffers for the largest graph; graphs never run at the same time, so all share them."""
        if id(plan) not in self._whole:
            self._whole[id(plan)] = plan.allocate(len(self._lengths), self.max_pages, self._table.device)
        return self._whole[id(plan)]

    def eager_step(self, forward_batch: Any) -> Step:
        """A step outside any graph, with buffers of its own; as narrow as the host's copy of the lengths allows."""
        width = self.max_pages
        if forward_batch.seq_lens_cpu is not None and forward_batch.seq_lens_cpu.numel():
            width = max(1, -(-int(forward_batch.seq_lens_cpu.max()) // self.page_size))
        table = torch.zeros(
            (forward_batch.seq_lens.shape[0], width), dtype=torch.int32, device=self.req_to_token.device
        )
        step = Step(flowlib.Batch(table, forward_batch.seq_lens.to(torch.int32)), width)
        self.fill(step, forward_batch)
        return step

    def fill(self, step: Step, forward_batch: Any) -> None:
        """Writes lengths and page table of a batch into a step's buffers; can be recorded in a graph."""
        from flowlib.kernels.planning import launch_page_table

        size = step.batch.seq_lens.shape[0]
        step.batch.seq_lens.copy_(forward_batch.seq_lens[:size])
        launch_page_table(
            self.req_to_token,
            forward_batch.req_pool_indices[:size],
            step.batch.seq_lens,
            step.batch.page_table,
            page_size=self.page_size,
        )

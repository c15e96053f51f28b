"""Counts of what decode steps attend to, for Prometheus: added up on the device, read when SGLang logs its own metrics.

A step only adds to tensors that stay in place, so it can be captured in a CUDA graph and waits for nothing. The host
reads the totals in :func:`publish`, which SGLang reaches through its scheduler's metrics collector: every
``--decode-log-interval`` steps, at a prefill and when it becomes idle. The read waits for the stream the scheduler
is on, not for a step in flight, so the newest steps may be missing from it until the next one.

Metrics, all counters with SGLang's labels of the rank and the label ``flow``:

``flowlib:pages_attended_total``, ``flowlib:pages_cached_total``
    entries of page lists and pages they were chosen from, over decode steps, requests, layers that choose pages and
    kv heads (query heads, where a flow chooses per query head). Their ratio is the share of the KV cache that is read.
``flowlib:dense_steps_total``, ``flowlib:sparse_steps_total``
    decode steps of single requests that attended to every page in every such layer, and the others.
``flowlib:saturated_bounds_total``
    float8 bounds of pages that were cut because ``summary_scale`` is too small for them.
"""

from typing import Any

import torch

METRICS = {
    "pages_attended": "Pages attended to by decode steps, summed over requests, sparse layers and page lists.",
    "pages_cached": "Pages that decode steps chose from, summed over requests, sparse layers and page lists.",
    "dense_steps": "Decode steps of single requests that attended to every page.",
    "sparse_steps": "Decode steps of single requests that left pages out.",
    "saturated_bounds": "Float8 bounds of pages that were cut, see summary_scale.",
}
PADDED_LENGTH = 1
"""Length of the padded rows of a graph. A real row has at least two tokens when it decodes."""


class Counters:
    """What the decode steps of one rank attended to since it started.

    Args:
        flow: name of the flow.
        pool: SGLang's pool with the flow's fields, whose stores count saturated bounds.
        lists: page lists per request and layer.
        layers: ids of the layers that choose pages.
        page_size: tokens per page.
        device: where the steps run.
        alike: in every layer the page lists of a request are equally long, so that the last layer's are counted for
            all; else each layer adds its own, a launch a layer.

    Attributes:
        totals: int64 ``[4]`` on the device: pages attended, pages cached, dense steps, sparse steps.
    """

    def __init__(
        self, flow: str, pool: Any, lists: int, layers: tuple[int, ...], page_size: int, device: torch.device | str,
        alike: bool = False,
    ) -> None:  # fmt: skip
        self.flow = flow
        self.totals = torch.zeros(4, dtype=torch.int64, device=device)
        self._pool = pool
        self._lists = lists
        self._layers = layers
        self._page_size = page_size
        self._alike = alike
        self._static = self._attended = self._zeros(0)

    def allocate(self, max_batch: int) -> None:
        """Makes the static buffer of the CUDA graphs, for at most `max_batch` requests."""
        self._static = self._zeros(max_batch)

    def begin(self, rows: int, in_graph: bool) -> None:
        """A step of `rows` requests begins; recorded in a graph if it is `in_graph`."""
        if not self._alike:
            self._attended = self._static[:rows].zero_() if in_graph else self._zeros(rows)

    def add(self, layer_id: int, lengths: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """One layer has attended.

        Args:
            layer_id: its id; the last one's ends the step.
            lengths: int32 ``[rows, lists]``, pages attended to.
            seq_lens: int32 ``[rows]``, tokens of the requests; padded rows have one.
        """
        if not self._alike:
            self._attended.add_(lengths)
        if layer_id != self._layers[-1]:
            return
        pages = torch.div(seq_lens.to(torch.int64) + self._page_size - 1, self._page_size, rounding_mode="floor")
        attended = lengths.sum(1) * len(self._layers) if self._alike else self._attended.sum(1)
        cached = pages * (self._lists * len(self._layers))
        dense = attended == cached
        step = torch.stack([attended, cached, dense.to(torch.int64), (~dense).to(torch.int64)])
        self.totals.add_((step * (seq_lens > PADDED_LENGTH)).sum(1))

    def _zeros(self, rows: int) -> torch.Tensor:
        return torch.zeros((rows, self._lists), dtype=torch.int64, device=self.totals.device)

    def read(self) -> dict[str, int]:
        """The totals by metric; copies them to the host."""
        saturated = [store.saturated for store in self._pool.flow_stores() if store.saturated is not None]
        whole = torch.cat([self.totals, torch.cat(saturated).sum()[None]] if saturated else [self.totals])
        counts = whole.tolist() + [0] * (not saturated)
        return dict(zip(METRICS, counts, strict=True))


class Publisher:
    """Prometheus counters of one rank, kept up with its :class:`Counters`.

    Args:
        counters: where the totals come from.
        labels: SGLang's labels of the rank.
        counter_class: ``prometheus_client.Counter`` or what SGLang's collector has in its place.
    """

    def __init__(self, counters: Counters, labels: dict[str, Any], counter_class: Any) -> None:
        self._counters = counters
        labels = {**labels, "flow": counters.flow}
        made = {name: counter_class(f"flowlib:{name}", text, list(labels)) for name, text in METRICS.items()}
        self._metrics = {name: metric.labels(**labels) for name, metric in made.items()}
        self._seen = dict.fromkeys(METRICS, 0)

    def publish(self) -> None:
        """Adds what came since the last call. A count that went back, its pool made anew, starts from zero."""
        for name, now in self._counters.read().items():
            before = self._seen[name] if now >= self._seen[name] else 0
            self._metrics[name].inc(now - before)
            self._seen[name] = now


class Served:
    """The counters of this process, once a backend has made them, and their publisher, once SGLang has logged."""

    counters: Counters | None = None
    publisher: Publisher | None = None


def serve(counters: Counters) -> None:
    """Makes `counters` the ones that :func:`publish` publishes in this process."""
    Served.counters = counters


def publish(collector: Any) -> None:
    """Brings the metrics up to date, if this process counts.

    Args:
        collector: SGLang's ``SchedulerMetricsCollector``, for its labels and its client.
    """
    if Served.counters is None:
        return
    if Served.publisher is None:
        from prometheus_client import Counter  # after SGLang has set the client's folder for several processes

        Served.publisher = Publisher(Served.counters, collector.labels, collector._counter_cls or Counter)
    Served.publisher.publish()

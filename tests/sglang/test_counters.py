"""Counts of decode steps, and how they reach Prometheus; without SGLang."""

from types import SimpleNamespace

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from flowlib.sglang import counters
from flowlib.sglang.counters import METRICS, Counters, Publisher

PAGE = 16
LAYERS = (1, 4)


class Pool:
    """Two layers with float8 bounds, and one without."""

    def __init__(self):
        self.cut = [torch.tensor([0]), torch.tensor([0])]

    def flow_stores(self):
        return [SimpleNamespace(saturated=n) for n in self.cut] + [SimpleNamespace(saturated=None)]


@pytest.fixture
def counted():
    return Counters("some_flow", Pool(), 2, LAYERS, PAGE, "cpu")


def step(made, seq_lens, attended, in_graph=False):
    """One step; `attended` by layer, row and list."""
    made.begin(len(seq_lens), in_graph)
    for layer, lengths in zip(LAYERS, attended, strict=True):
        made.add(layer, torch.tensor(lengths, dtype=torch.int32), torch.tensor(seq_lens, dtype=torch.int32))


def values(*numbers):
    return dict(zip(METRICS, numbers, strict=True))


def test_pages_and_steps_are_added_up(counted):
    step(counted, [33, 48, 16], [[[3, 3], [2, 3], [1, 1]], [[3, 3], [3, 3], [1, 1]]])
    assert counted.read() == values(12 + 11 + 4, 4 * (3 + 3 + 1), 2, 1, 0)
    step(counted, [17], [[[1, 2], ], [[2, 2]]])
    assert counted.read() == values(27 + 7, 28 + 8, 2, 2, 0)


def test_lists_that_are_alike_in_all_layers_are_counted_at_the_last(counted):
    once = Counters("some_flow", Pool(), 2, LAYERS, PAGE, "cpu", alike=True)
    lengths = [[3, 2], [4, 4], [1, 1]]
    for made, first in ((counted, lengths), (once, [[9, 9], [9, 9], [9, 9]])):
        step(made, [49, 50, 1], [first, lengths], in_graph=False)
    assert once.read() == counted.read()
    assert once.read()["pages_attended"] == 2 * (3 + 2 + 4 + 4)


def test_padded_rows_are_not_counted(counted):
    step(counted, [2, 1, 1], [[[1, 1], [1, 1], [1, 1]]] * 2)
    assert counted.read() == values(4, 4, 1, 0, 0)


def test_a_step_that_did_not_end_is_forgotten(counted):
    counted.begin(1, in_graph=False)
    counted.add(LAYERS[0], torch.tensor([[9, 9]], dtype=torch.int32), torch.tensor([160], dtype=torch.int32))
    step(counted, [160], [[[2, 2]], [[2, 2]]])
    assert counted.read() == values(8, 40, 0, 1, 0)


def test_steps_of_a_graph_use_the_same_buffer_at_each_replay(counted):
    """What is captured is made again with the tensors in place: the addresses stay, the totals grow."""
    counted.allocate(4)
    for rows in (3, 4, 2):
        before = counted.totals.data_ptr()
        step(counted, [64] * rows, [[[2, 2]] * rows] * 2, in_graph=True)
        assert counted.totals.data_ptr() == before
        assert counted._attended.data_ptr() == counted._static.data_ptr()
    assert counted.read() == values(9 * 8, 9 * 16, 0, 9, 0)


def test_saturated_bounds_of_all_layers(counted):
    for number, layer in enumerate(counted._pool.cut):
        layer += 3 + number
    assert counted.read()["saturated_bounds"] == 7


def test_prometheus_gets_what_came_since_and_never_goes_back(counted):
    registry = CollectorRegistry()
    publisher = Publisher(
        counted, {"tp_rank": 0}, lambda name, text, labels: Counter(name, text, labels, registry=registry)
    )

    def published():
        labels = {"tp_rank": "0", "flow": "some_flow"}
        return [int(registry.get_sample_value(f"flowlib:{name}_total", labels)) for name in METRICS]

    assert published() == [0] * 5
    for _ in range(2):
        step(counted, [160], [[[2, 2]], [[2, 2]]])
    counted._pool.cut[0] += 5
    publisher.publish()
    publisher.publish()
    assert published() == [16, 80, 0, 2, 5]
    counted._pool.cut[0].fill_(2)  # the pool was made anew
    publisher.publish()
    assert published() == [16, 80, 0, 2, 7]


def test_without_a_backend_that_counts_nothing_is_published(monkeypatch):
    monkeypatch.setattr(counters.Served, "counters", None)
    monkeypatch.setattr(counters.Served, "publisher", None)
    counters.publish(SimpleNamespace())
    assert counters.Served.publisher is None


def test_a_step_reads_nothing_on_the_host():
    """Fake tensors have no values: a step that looked at one would raise, as reading them does."""
    with FakeTensorMode():
        made = Counters("some_flow", Pool(), 2, LAYERS, PAGE, "cpu")
        made.allocate(4)
        for in_graph in (False, True):
            step(made, [64, 33], [[[2, 2], [1, 1]]] * 2, in_graph)
        with pytest.raises(DataDependentOutputException):
            made.totals[0].item()

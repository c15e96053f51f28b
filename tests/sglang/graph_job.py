"""Called by ``objects_job`` for ``test_graph``: the backend driven as SGLang drives it around a CUDA graph, on a CPU.

A graph replays what was captured: the same buffers with new contents. Here the captured calls are made again instead.
"""

import inspect
import pkgutil
from contextlib import nullcontext
from importlib.metadata import version
from types import SimpleNamespace

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from flowlib.sglang import graphs, ledger
from flowlib.sglang.backend import FlowBackend
from tests.sglang.pool_job import DIM, HEADS, PAGE, make, said_by

CONTEXT, MAX_BATCH = 96, 3
KEYS = {"0.5.16": "_resolve_lora_variant", "0.5.23": "_resolve_attention_variant"}
"""The part of a graph's key that a version of SGLang chooses for each batch."""
LENGTHS = {"short": [48, 2, 1], "one long": [2, 49], "nobody": [], "unknown": None}


class Model(torch.nn.Module):
    """Two attention layers, the second with a softmax scale of its own."""

    def __init__(self):
        super().__init__()
        self.first = RadixAttention(6, DIM, 0.125, HEADS, 0)
        self.second = RadixAttention(6, DIM, 0.2, HEADS, 1)


def backend(impl, ranks=1):
    """A backend over a pool of its own whose slots hold the same keys for both implementations.

    Args:
        ranks: of data parallel attention.
    """
    _, pool = make(torch.float32, torch.float32, top_k=1, impl=impl, dense_below=0)
    generator = torch.Generator().manual_seed(4)
    slots = torch.arange(pool.size + PAGE)
    model = Model()
    for layer in (model.first, model.second):
        k = torch.randn(len(slots), HEADS, DIM, generator=generator)
        pool.set_kv_buffer(layer, slots, k, k.flip(0).contiguous())
    pages = torch.tensor([[5, 2, 7, 1, 0, 0], [6, 3, 4, 0, 0, 0], [0] * 6, [2, 4, 6, 1, 3, 0]])
    table = (pages[:, :, None] * PAGE + torch.arange(PAGE)).reshape(len(pages), CONTEXT).to(torch.int32)
    runner = SimpleNamespace(
        token_to_kv_pool=pool, req_to_token_pool=SimpleNamespace(req_to_token=table), model=model,
        server_args=SimpleNamespace(
            get_attention_backends=lambda: ("torch_native", "flowlib"), enable_metrics=True,
            attention_backend=None, prefill_attention_backend="torch_native", decode_attention_backend="flowlib",
            enable_dp_attention=ranks > 1, dp_size=ranks, attn_dp_size=ranks,
        ),
    )
    return FlowBackend(runner), model


def batch(indices, lengths, table):
    """SGLang's batch of one decode step; padded rows write to slot 0."""
    last = [int(table[i, n - 1]) if n > 1 else 0 for i, n in zip(indices, lengths, strict=True)]
    seq_lens = torch.tensor(lengths)
    return SimpleNamespace(
        batch_size=len(indices),
        req_pool_indices=torch.tensor(indices),
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens,
        out_cache_loc=torch.tensor(last),
        rids=None,
        forward_mode=ForwardMode.DECODE,
    )


def inputs(seed, rows):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, 6 * DIM, generator=generator),
        torch.randn(rows, HEADS, DIM, generator=generator),
        torch.randn(rows, HEADS, DIM, generator=generator),
    )


def layers_of(model):
    return (model.first, model.second)


def refusals(backend, layer, now):
    """Calls that a flow can't serve, as models make them."""
    q, k, v = inputs(0, len(now.seq_lens))
    return {
        "sinks": lambda: backend.forward_decode(q, k, v, layer, now, sinks=torch.zeros(6)),
        "written elsewhere": lambda: backend.forward_decode(q, k, v, layer, now, save_kv_cache=False),
        "another layer's": lambda: backend.forward_decode(q, None, None, layer, now),
        "prefill": lambda: backend.forward_extend(q, k, v, layer, now),
        "nothing given": lambda: backend.forward_decode(q, k, v, layer, now, sinks=None),
    }


class Replays:
    """A captured graph of a batch size: the calls of its capture made again, beside the reference.

    Args:
        short: whether it is the graph of short batches.
    """

    def __init__(self, kernels, model, short=False):
        self.kernels, self.model = kernels, model
        self.reference, self.other = backend("reference")
        self.table = self.reference.req_to_token_pool.req_to_token
        self.static = batch([2, 2, 2], [1, 1, 1], self.table)
        self.worst, self.buffers = 0.0, set()
        with graphs.capturing_short(kernels) if short else nullcontext():
            kernels.init_forward_metadata_out_graph(self.static, in_capture=True)
        self.step = kernels.step

    def replay(self, seed, indices, lengths):
        """One step; returns SGLang's batch of it."""
        kernels, reference, static = self.kernels, self.reference, self.static
        now = batch(indices, lengths, self.table)
        for name in ("req_pool_indices", "seq_lens", "out_cache_loc"):
            getattr(static, name).copy_(getattr(now, name))
        kernels.init_forward_metadata_out_graph(static)
        kernels.step = self.step  # a graph has its own buffers captured
        kernels.init_forward_metadata_in_graph(static)
        reference.init_forward_metadata(now)
        for layer, twin in zip(layers_of(self.model), layers_of(self.other), strict=True):
            q, k, v = inputs(seed, len(indices))
            found = kernels.forward_decode(q, k.clone(), v.clone(), layer, static)
            wanted = reference.forward_decode(q, k.clone(), v.clone(), twin, now)
            self.worst = max(self.worst, float((found - wanted).abs().max()))
            self.buffers.add((layer.layer_id, self.step.output(kernels.setup.plan_for(layer)).o.data_ptr()))
        return now


def hooked(target):
    """SGLang's function and flowlib's hook around it, by the end of its path."""
    touch = next(touch for touch in ledger.hooks() if touch.target.endswith(target))
    return pkgutil.resolve_name(touch.target), pkgutil.resolve_name(touch.hook)


def runner_of(backend):
    """SGLang's runner of decode graphs, as far as the hooks see it."""
    hybrid = SimpleNamespace(decode_backend=backend, prefill_backend=None)
    return SimpleNamespace(attn_backend=hybrid, record_nolora_graph=False, attention_graph_variants=None)


def captured_keys(backend):
    """What one call of ``capture_one_shape`` captures: the last label of the key, and whether it is for short rows."""
    captured = []
    _, hook = hooked(".capture_one_shape")
    hook(lambda _, *args: captured.append([args[-1], backend.captures_short]), runner_of(backend), 4, None)
    return captured


def chosen_key(backend, lengths):
    """The label of the graph that a batch is replayed by, as SGLang's own function and the hook around it say."""
    lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int64)
    function, hook = hooked("DecodeCudaGraphRunner." + KEYS[version("sglang")])
    more = len(inspect.signature(function).parameters) - 2
    return hook(function, runner_of(backend), SimpleNamespace(seq_lens_cpu=lengths), *[4] * more)


def answer_short(kernels, model):
    """The graph of short batches, captured beside the other one."""
    short = Replays(kernels, model, short=True)
    for layer in layers_of(model):
        kernels.setup.plan_for(layer)._executor.choose = None  # a graph of short batches neither scores nor selects
    for seed, (indices, lengths) in enumerate([([0, 1, 2], [48, 33, 1]), ([3, 0, 1], [17, 48, 2])]):
        short.replay(seed, indices, lengths)
    apart, dense = backend("triton", ranks=2)[0], SimpleNamespace(short_tokens=0, captures_short=False)
    return {
        "worst": short.worst, "width": short.step.batch.page_table.shape[1], "limit": kernels.short_tokens,
        "captured": captured_keys(kernels), "keys": {name: chosen_key(kernels, own) for name, own in LENGTHS.items()},
        "without": [{"captured": captured_keys(b), "key": chosen_key(b, [5])} for b in (apart, dense)],
    }  # fmt: skip


def answer():
    kernels, model = backend("triton")
    kernels.init_cuda_graph_state(MAX_BATCH, MAX_BATCH)
    graph = Replays(kernels, model)
    steps = [([0, 1, 2], [60, 48, 1]), ([3, 0, 2], [81, 61, 1]), ([1, 3, 0], [33, 82, 64])]
    for seed, (indices, lengths) in enumerate(steps):
        now = graph.replay(seed, indices, lengths)
    fill = kernels.get_cuda_graph_seq_len_fill_value()
    refused = said_by(refusals(graph.reference, layers_of(graph.other)[0], now))
    counts = [kernels.counters.read(), graph.reference.counters.read()]
    return {
        "worst": graph.worst, "buffers": len(graph.buffers), "fill": fill, "counts": counts, "refused": refused,
        "short": answer_short(kernels, model),
    }  # fmt: skip

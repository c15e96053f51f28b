"""Called by ``objects_job`` for ``test_graph``: the backend driven as SGLang drives it around a CUDA graph, on a CPU.

A graph replays what was captured: the same buffers with new contents. Here the captured calls are made again instead.
"""

from types import SimpleNamespace

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from flowlib.sglang.backend import FlowBackend
from tests.sglang.pool_job import DIM, HEADS, PAGE, make, said_by

CONTEXT, MAX_BATCH = 96, 3


class Model(torch.nn.Module):
    """Two attention layers, the second with a softmax scale of its own."""

    def __init__(self):
        super().__init__()
        self.first = RadixAttention(6, DIM, 0.125, HEADS, 0)
        self.second = RadixAttention(6, DIM, 0.2, HEADS, 1)


def backend(impl):
    """A backend over a pool of its own whose slots hold the same keys for both implementations."""
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


def answer():
    kernels, model = backend("triton")
    reference, other = backend("reference")
    table = reference.req_to_token_pool.req_to_token
    kernels.init_cuda_graph_state(MAX_BATCH, MAX_BATCH)
    static = batch([2, 2, 2], [1, 1, 1], table)
    kernels.init_forward_metadata_out_graph(static, in_capture=True)
    steps = [([0, 1, 2], [60, 48, 1]), ([3, 0, 2], [81, 61, 1]), ([1, 3, 0], [33, 82, 64])]
    worst, buffers = 0.0, set()
    for seed, (indices, lengths) in enumerate(steps):
        now = batch(indices, lengths, table)
        for name in ("req_pool_indices", "seq_lens", "out_cache_loc"):
            getattr(static, name).copy_(getattr(now, name))
        kernels.init_forward_metadata_out_graph(static)
        kernels.init_forward_metadata_in_graph(static)
        reference.init_forward_metadata(now)
        for layer, twin in zip(layers_of(model), layers_of(other), strict=True):
            q, k, v = inputs(seed, len(indices))
            found = kernels.forward_decode(q, k.clone(), v.clone(), layer, static)
            wanted = reference.forward_decode(q, k.clone(), v.clone(), twin, now)
            worst = max(worst, float((found - wanted).abs().max()))
            buffers.add((layer.layer_id, kernels.step.output(kernels.setup.plan_for(layer)).o.data_ptr()))
    fill = kernels.get_cuda_graph_seq_len_fill_value()
    refused = said_by(refusals(reference, layers_of(other)[0], now))
    counts = [kernels.counters.read(), reference.counters.read()]
    return {"worst": worst, "buffers": len(buffers), "fill": fill, "counts": counts, "refused": refused}

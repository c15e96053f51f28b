"""A plugin for tests: recomputes the fields of all live pages before decode steps, and notes each prefill in chunks.

``LATENT_REPORT`` names the file. A line has, before a decode step, the pages compared and those that differed; of a
layer's prefill the context of its requests, the rows of each chunk, and what computed the attention.
"""

import json
import os

from page_check import live_pages


def register():
    import flowlib.mla
    from flowlib.sglang.backend import FlowBackend

    plan, prefill = FlowBackend.init_forward_metadata, flowlib.mla.chunked_prefill

    def planned(self, forward_batch):
        if forward_batch.forward_mode.is_decode():
            compare(self, forward_batch)
        plan(self, forward_batch)

    def prefilled(q, k, v, cache, block_table, context, *rest, **named):
        out = prefill(q, k, v, cache, block_table, context, *rest, **named)
        note({"context": context.context_lens, "chunks": context.lens.tolist(), "attention": out.attention})
        return out

    FlowBackend.init_forward_metadata, flowlib.mla.chunked_prefill = planned, prefilled


def compare(backend, forward_batch):
    pool = backend.token_to_kv_pool
    pages = live_pages(backend, forward_batch, pool.page_size)
    wrong = 0
    for layer_id, fields in pool.flow_fields.items():
        latent = pool.kv_buffer[layer_id].view(-1, pool.page_size, pool.kv_cache_dim)[pages].double()
        for name, field in fields.items():
            found = field[pages, 0].double()
            parts = latent.view(len(pages), found.shape[1], -1, pool.kv_cache_dim)
            want = {"centroid": parts.mean(2), "latent_max": parts.amax(2), "latent_min": parts.amin(2)}[name]
            bound = 2.0**-23 * parts.abs().amax(2) * (parts.shape[2] if name == "centroid" else 0)
            wrong += int(((found - want).abs() > bound).flatten(1).any(1).sum())
    note({"pages": len(pages), "layers": len(pool.flow_fields), "wrong": wrong})


def note(line):
    with open(os.environ["LATENT_REPORT"], "a") as file:
        file.write(json.dumps(line) + "\n")

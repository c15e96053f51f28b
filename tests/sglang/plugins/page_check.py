"""A plugin for tests: recomputes the summaries of all live pages before decode steps, and reports differences.

Each line of the file named by ``PAGE_CHECK_REPORT`` has the pages compared and those that differed. The pages of a step
are those its requests have finished, shared ones among them; the fields are those of the Quest flows.
"""

import json
import os

import torch


def register():
    from flowlib.sglang.backend import FlowBackend

    original = FlowBackend.init_forward_metadata

    def checked(self, forward_batch):
        if forward_batch.forward_mode.is_decode():
            report(self, forward_batch)
        original(self, forward_batch)

    FlowBackend.init_forward_metadata = checked


def live_pages(backend, forward_batch, size):
    table = backend.req_to_token_pool.req_to_token
    pages = set()
    for index, length in zip(forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist(), strict=True):
        full = (length - 1) // size  # the step's own token is not written yet
        pages |= {slot // size for slot in table[index, : full * size : size].tolist()}
    return torch.tensor(sorted(pages))


def report(backend, forward_batch):
    pool = backend.token_to_kv_pool
    pages = live_pages(backend, forward_batch, pool.page_size)
    wrong = 0
    for layer_id, fields in pool.flow_fields.items():
        keys = pool.k_buffer[layer_id].view(-1, pool.page_size, pool.head_num, pool.head_dim)[pages]
        for name, want in (("k_max", keys.amax(1)), ("k_min", keys.amin(1))):
            wrong += int((fields[name][pages].view(want.shape) != want).flatten(1).any(1).sum())
    line = {"pages": len(pages), "layers": len(pool.flow_fields), "wrong": wrong}
    with open(os.environ["PAGE_CHECK_REPORT"], "a") as file:
        file.write(json.dumps(line) + "\n")

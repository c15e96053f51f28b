"""Prefill of multi-head latent attention over a cached context, in chunks.

New tokens attend to their request's cached context and to themselves. To up-project the whole context into keys and
values of all heads takes too much memory, so it is done in chunks of latent rows, whose partial attentions are merged
by their log-sum-exp (DeepSeek-V2's MHA form of MLA; the chunked scheme of vLLM and SGLang)::

    rows = workspace_rows(max_model_len, max_num_seqs, page_size)                       # once
    context = build_chunked_context(context_lens, query_start_loc, rows, page_size)     # once a forward pass
    out = chunked_prefill(q, k, v, cache, block_table, context, up_project, scale=scale, impl="triton")   # every layer

Importing this package imports neither Triton nor FlashInfer.
"""

from __future__ import annotations

from flowlib.mla.attention import check_lse_base, resolve_attention, varlen_attention
from flowlib.mla.gather import gather_latent
from flowlib.mla.merge import merge_attn_states
from flowlib.mla.prefill import PrefillOutput, chunked_prefill
from flowlib.mla.projection import UpProjection, up_projection
from flowlib.mla.ragged import RaggedBatch
from flowlib.mla.schedule import Chunk, ChunkedContext, build_chunked_context, workspace_rows

__all__ = [
    "Chunk",
    "ChunkedContext",
    "PrefillOutput",
    "RaggedBatch",
    "UpProjection",
    "build_chunked_context",
    "check_lse_base",
    "chunked_prefill",
    "gather_latent",
    "merge_attn_states",
    "resolve_attention",
    "up_projection",
    "varlen_attention",
    "workspace_rows",
]

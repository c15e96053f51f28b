"""Streaming attention: the first and the last pages only.

Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks (arXiv:2309.17453).
Nothing is scored: a row attends to its reserved pages, the first `bos` (sinks) and the last `eos` (recent).
"""

from __future__ import annotations

from collections.abc import Mapping

from flowlib import ContextBase, SelectionHandle, register, vFlow, vTensor
from flowlib.ops import Reserved


@register("streaming_attention", "streaming")
class StreamingAttention(vFlow):
    """Sinks and recent pages; the budget `top_k` is not used."""

    def __init__(self) -> None:
        self.reserved = Reserved()

    def forward_indexer(self, q: vTensor, o: SelectionHandle, cache: Mapping[str, vTensor], ctx: ContextBase) -> None:
        self.reserved(o, ctx=ctx)

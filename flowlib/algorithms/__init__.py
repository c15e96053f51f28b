"""The built-in flows; importing this package registers them."""

from flowlib.algorithms.block_sparse import BlockSparseAttention, GQABlockSparseAttention
from flowlib.algorithms.quest import GQAQuestSparseAttention, QuestSparseAttention
from flowlib.algorithms.streaming import StreamingAttention

__all__ = [
    "BlockSparseAttention",
    "GQABlockSparseAttention",
    "GQAQuestSparseAttention",
    "QuestSparseAttention",
    "StreamingAttention",
]

"""The built-in flows; importing this package registers them."""

from flowlib.algorithms.block_sparse import BlockSparseAttention, GQABlockSparseAttention
from flowlib.algorithms.centered import CenteredBlockSparseAttention
from flowlib.algorithms.entmax import EntmaxGaussianAttention, EntmaxTopKAttention
from flowlib.algorithms.gaussian import GaussianSparseAttention
from flowlib.algorithms.h2o import GQAH2OSparseAttention, H2OSparseAttention
from flowlib.algorithms.h2o_token import GQAH2OTokenSparseAttention, H2OTokenSparseAttention
from flowlib.algorithms.lserve import LServeCentroidSparseAttention, LServeSparseAttention
from flowlib.algorithms.masked_quest import MaskedQuestSparseAttention
from flowlib.algorithms.mla import (
    LServeCentroidMLA,
    QuestMLA,
    RopeAwareBlockSparseMLA,
    RopeUnawareBlockSparseMLA,
)
from flowlib.algorithms.quest import GQAQuestSparseAttention, QuestSparseAttention
from flowlib.algorithms.running_avg import RunningAvgBlockSparseAttention
from flowlib.algorithms.streaming import StreamingAttention
from flowlib.algorithms.twilight import TwilightAttention
from flowlib.algorithms.venergy_gated import VEnergyGatedCentroid

__all__ = [
    "BlockSparseAttention",
    "CenteredBlockSparseAttention",
    "EntmaxGaussianAttention",
    "EntmaxTopKAttention",
    "GQABlockSparseAttention",
    "GQAH2OSparseAttention",
    "GQAH2OTokenSparseAttention",
    "GQAQuestSparseAttention",
    "GaussianSparseAttention",
    "H2OSparseAttention",
    "H2OTokenSparseAttention",
    "LServeCentroidMLA",
    "LServeCentroidSparseAttention",
    "LServeSparseAttention",
    "MaskedQuestSparseAttention",
    "QuestMLA",
    "QuestSparseAttention",
    "RopeAwareBlockSparseMLA",
    "RopeUnawareBlockSparseMLA",
    "RunningAvgBlockSparseAttention",
    "StreamingAttention",
    "TwilightAttention",
    "VEnergyGatedCentroid",
]

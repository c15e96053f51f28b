"""Independent float64 oracles: every built-in flow a second time, from its formula, without flowlib's ops.

One flow is one small class; :func:`oracle_of` finds it by the flow's name, and ``verify_flow(..., oracle=...)`` takes
another.
"""

from flowlib.testing.oracles import (  # noqa: F401  (each registers its oracles)
    block_sparse,
    entmax,
    gaussian,
    h2o,
    lserve,
    mla,
    quest,
    streaming,
    twilight,
)
from flowlib.testing.oracles.attention import Attention, attention, dense_attention, tokens_of
from flowlib.testing.oracles.base import ABOUT_ROW, Oracle, Pages, has_oracle, oracle, oracle_of

__all__ = [
    "ABOUT_ROW",
    "Attention",
    "Oracle",
    "Pages",
    "attention",
    "dense_attention",
    "has_oracle",
    "oracle",
    "oracle_of",
    "tokens_of",
]

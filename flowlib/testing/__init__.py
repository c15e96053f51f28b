"""Public test library: independent float64 oracles, derived tolerances, hostile inputs, and a verifier of flows.

    from flowlib.testing import scene, verify_flow
    report = verify_flow("gqa_quest_sparse_attention")
    print(report)

``flowlib.testing.strategies`` (Hypothesis strategies) and ``flowlib.testing.compile_only`` are imported by name.
"""

from flowlib.testing.inputs import Scene, fill_nan, ragged_lengths, reverse_interleaved, scene
from flowlib.testing.oracles import Oracle, attention, dense_attention, has_oracle, oracle, oracle_of, tokens_of
from flowlib.testing.own_reference import ReferenceOracle
from flowlib.testing.tolerance import (
    Expected,
    Judgement,
    accumulation_step,
    condition,
    derive,
    expect,
    gamma,
    judge,
    rounding_step,
    unit_roundoff,
    upcast,
)
from flowlib.testing.verify import Case, StageResult, VerifyReport, default_cases, verify_flow

__all__ = [
    "Case",
    "Expected",
    "Judgement",
    "Oracle",
    "ReferenceOracle",
    "Scene",
    "StageResult",
    "VerifyReport",
    "accumulation_step",
    "attention",
    "condition",
    "default_cases",
    "dense_attention",
    "derive",
    "expect",
    "fill_nan",
    "gamma",
    "has_oracle",
    "judge",
    "oracle",
    "oracle_of",
    "ragged_lengths",
    "reverse_interleaved",
    "rounding_step",
    "scene",
    "tokens_of",
    "unit_roundoff",
    "upcast",
    "verify_flow",
]

"""The ops of the flow language; one op, or one family of one-liners, per file."""

from collections.abc import Callable

from flowlib.core.refused import REFUSED, refused
from flowlib.ops.elementwise import (
    Add,
    CAdd,
    CDivide,
    CMaximum,
    CMinimum,
    CMultiply,
    Divide,
    Maximum,
    Minimum,
    Multiply,
    WhereEqual,
    WhereGreater,
    WhereGreaterEqual,
    WhereLess,
    WhereLessEqual,
    WhereNotEqual,
)
from flowlib.ops.gaussian_tau import GaussianTau
from flowlib.ops.interleave import (
    CMaxInterleave,
    CMeanInterleave,
    CMinInterleave,
    MaxInterleave,
    MeanInterleave,
    MinInterleave,
)
from flowlib.ops.layout import CMaskSlice, CReshape, CTranspose, Kron, MaskSlice, Reshape, Transpose
from flowlib.ops.matmul import CGeMM, GeMM, GeMV
from flowlib.ops.pages import Conv1d, L2Normalize, Normalize
from flowlib.ops.reduce import CL2Norm, CMax, CMean, CMin, CSum, L2Norm, Max, Mean, Min, Sum
from flowlib.ops.select import Reserved, Threshold, TopK, Union, approxTopK, topK, topP
from flowlib.ops.softmax import Softmax
from flowlib.ops.state import CFill, Fill, Load, PagePosition, Save
from flowlib.ops.std import CStd, Std
from flowlib.ops.unary import (
    Abs,
    Add_Mul,
    CAbs,
    CAdd_Mul,
    CClamp,
    CExp,
    Clamp,
    CLog,
    CRelu,
    CSigmoid,
    CSilu,
    CSqrt,
    Exp,
    Log,
    Relu,
    Sigmoid,
    Silu,
    Sqrt,
)

__all__ = [
    "Abs",
    "Add",
    "Add_Mul",
    "CAbs",
    "CAdd",
    "CAdd_Mul",
    "CClamp",
    "CDivide",
    "CExp",
    "CFill",
    "CGeMM",
    "CL2Norm",
    "CLog",
    "CMaskSlice",
    "CMax",
    "CMaxInterleave",
    "CMaximum",
    "CMean",
    "CMeanInterleave",
    "CMin",
    "CMinInterleave",
    "CMinimum",
    "CMultiply",
    "CRelu",
    "CReshape",
    "CSigmoid",
    "CSilu",
    "CSqrt",
    "CStd",
    "CSum",
    "CTranspose",
    "Clamp",
    "Conv1d",
    "Divide",
    "Exp",
    "Fill",
    "GaussianTau",
    "GeMM",
    "GeMV",
    "Kron",
    "L2Norm",
    "L2Normalize",
    "Load",
    "Log",
    "MaskSlice",
    "Max",
    "MaxInterleave",
    "Maximum",
    "Mean",
    "MeanInterleave",
    "Min",
    "MinInterleave",
    "Minimum",
    "Multiply",
    "Normalize",
    "PagePosition",
    "Relu",
    "Reserved",
    "Reshape",
    "Save",
    "Sigmoid",
    "Silu",
    "Softmax",
    "Sqrt",
    "Std",
    "Sum",
    "Threshold",
    "TopK",
    "Transpose",
    "Union",
    "WhereEqual",
    "WhereGreater",
    "WhereGreaterEqual",
    "WhereLess",
    "WhereLessEqual",
    "WhereNotEqual",
    "approxTopK",
    "topK",
    "topP",
]


def __getattr__(name: str) -> Callable[..., object]:
    if name in REFUSED:
        return refused(name)
    raise AttributeError(f"module 'flowlib.ops' has no attribute {name!r}")

"""The ops of the flow language; one op, or one family of one-liners, per file."""

from flowlib.ops.elementwise import Add, CAdd, CMaximum, CMinimum, CMultiply, Maximum, Minimum, Multiply
from flowlib.ops.matmul import CGeMM, GeMM, GeMV
from flowlib.ops.reduce import CL2Norm, CMax, CMean, CMin, CSum, L2Norm, Max, Mean, Min, Sum
from flowlib.ops.select import Reserved, topK
from flowlib.ops.softmax import Softmax

__all__ = [
    "Add",
    "CAdd",
    "CGeMM",
    "CL2Norm",
    "CMax",
    "CMaximum",
    "CMean",
    "CMin",
    "CMinimum",
    "CMultiply",
    "CSum",
    "GeMM",
    "GeMV",
    "L2Norm",
    "Max",
    "Maximum",
    "Mean",
    "Min",
    "Minimum",
    "Multiply",
    "Reserved",
    "Softmax",
    "Sum",
    "topK",
]

"""The exceptions users see; see :mod:`flowlib.core.errors`."""

from flowlib.core.errors import (
    BackendError,
    BatchError,
    FlowDefinitionError,
    FlowlibError,
    FlowLoadError,
    FormatError,
    OptionError,
    ShapeError,
    SourceLine,
    UnknownFlowError,
)

__all__ = [
    "BackendError",
    "BatchError",
    "FlowDefinitionError",
    "FlowLoadError",
    "FlowlibError",
    "FormatError",
    "OptionError",
    "ShapeError",
    "SourceLine",
    "UnknownFlowError",
]

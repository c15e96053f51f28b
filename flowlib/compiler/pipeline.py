"""The compiler, on one screen: trace -> verify -> simplify -> partition -> size -> emit -> load.

All steps but the last are pure Python on frozen values; the last one imports Triton, and runs at the first launch.
"""

from __future__ import annotations

from flowlib.compiler.emit import emit
from flowlib.compiler.partition import partition
from flowlib.compiler.program import Program
from flowlib.compiler.simplify import simplify
from flowlib.compiler.verify import check_attention, check_state, verify
from flowlib.core.flow import vFlow
from flowlib.core.spec import Spec
from flowlib.core.trace import trace


def compile_flow(flow: vFlow, spec: Spec) -> Program:
    """Profiles and compiles a flow for a spec, up to and including its source text.

    Raises:
        FlowDefinitionError, ShapeError, FormatError, OptionError: the flow or the spec is not well formed.
    """
    flow.check_spec(spec)
    traced = trace(flow, spec)
    verify(traced)
    check_attention(traced, spec)
    traced = simplify(traced)
    stages, buffers, hints = partition(traced)
    check_state(traced, spec)
    source = emit(stages, spec, title=f"{type(traced.flow).__name__}")
    return Program(traced, stages, buffers, source, hints)

"""Running Triton kernels on CPU tensors, through Triton's NumPy interpreter.

Triton decides while it is imported whether kernels are interpreted, from ``TRITON_INTERPRET``. Stock, its interpreter
is silently wrong in bfloat16 and fp8; :func:`install` checks the precondition and puts flowlib's repair in place.
Importing this module imports neither Triton nor NumPy.
"""

from __future__ import annotations

import os
import sys

from flowlib.core.errors import BackendError

_INTERPRET_VARIABLE = "TRITON_INTERPRET"
_FIX = (
    f"impl='triton' on CPU tensors needs {_INTERPRET_VARIABLE}=1 set before Triton is imported: start Python with "
    f"{_INTERPRET_VARIABLE}=1 in its environment, or use impl='reference'"
)


def requested() -> bool:
    """Whether the environment asks for interpreted kernels."""
    return os.environ.get(_INTERPRET_VARIABLE, "0").lower() in ("1", "true", "yes", "on")


def active() -> bool:
    """Whether Triton has been imported and interprets its kernels in this process."""
    standard = sys.modules.get("triton.language.standard")
    return standard is not None and type(standard.sum).__name__ == "InterpretedFunction"


def install() -> None:
    """Repair Triton's interpreter in this process; further calls do nothing.

    Raises:
        BackendError: ``TRITON_INTERPRET`` is not set, was set after Triton's import, or Triton is not installed.
    """
    if not requested():
        raise BackendError(f"{_FIX}; {_INTERPRET_VARIABLE} is {os.environ.get(_INTERPRET_VARIABLE)!r}")
    try:
        import triton.language  # noqa: F401
    except ImportError as error:
        raise BackendError(f"impl='triton' needs the package triton, which cannot be imported: {error}") from error
    if not active():
        raise BackendError(f"{_FIX}; in this process Triton was imported before the variable was set")
    from flowlib.runtime import interpreter_repair

    interpreter_repair.apply()

"""What every function of :mod:`flowlib.mla` checks of its arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flowlib.core.errors import BackendError, BatchError, FormatError, OptionError, ShapeError
from flowlib.runtime import interpreter
from flowlib.runtime.plan import IMPLEMENTATIONS

LARGEST = 2**31 - 1
"""Lengths, positions and page ids are int32."""


def check_impl(what: str, impl: str, device: torch.device) -> None:
    """Raises OptionError for an unknown `impl`, BackendError if it can't run on `device`."""
    if impl not in IMPLEMENTATIONS:
        raise OptionError(f"{what}: impl is {impl!r}, expected 'reference' or 'triton'")
    if impl == "triton" and device.type == "cpu":
        interpreter.install()
    elif impl == "triton" and device.type != "cuda":
        raise BackendError(
            f"{what}: impl='triton' on {device.type} tensors: expected cuda, or CPU tensors interpreted"
        )


def check_tensor(
    what: str,
    name: str,
    value: object,
    axes: str,
    shape: Sequence[int | None],
    dtypes: torch.dtype | Sequence[torch.dtype] | None = None,
    device: torch.device | None = None,
) -> None:
    """Holds a tensor against its description.

    Args:
        what: the function, for the message.
        name: the argument.
        axes: names of the axes, ``"T H D"``.
        shape: sizes; ``None`` takes any.
        dtypes: one or several allowed; ``None`` takes any floating dtype.
        device: where it must lie; ``None`` takes any.

    Raises:
        FormatError: no tensor, or of another dtype.
        ShapeError: another rank or size.
        BatchError: on another device.
    """
    wanted = "[" + ", ".join(a if n is None else str(n) for a, n in zip(axes.split(), shape, strict=True)) + "]"
    if not isinstance(value, torch.Tensor):
        raise FormatError(f"{what}: {name} is {type(value).__name__}, expected a tensor {wanted} [{axes}]")
    if value.dim() != len(shape) or any(n not in (None, m) for n, m in zip(shape, value.shape, strict=True)):
        raise ShapeError(f"{what}: {name} is {list(value.shape)}, expected {wanted} [{axes}]")
    if dtypes is None:
        if not value.is_floating_point():
            raise FormatError(f"{what}: {name} is {value.dtype}, expected a floating dtype")
    else:
        allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
        if value.dtype not in allowed:
            raise FormatError(f"{what}: {name} is {value.dtype}, expected {' or '.join(map(str, allowed))}")
    if device is not None and value.device != device:
        raise BatchError(f"{what}: {name} is on {value.device}, expected {device} as the others")


def check_writable(what: str, name: str, value: torch.Tensor) -> None:
    """Refuses an output whose elements share memory, as an expanded tensor's do."""
    if any(size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True)):
        raise BatchError(f"{what}: {name} has strides {list(value.stride())}: its elements share memory, pass a clone")


def integers(what: str, name: str, values: torch.Tensor | Sequence[int]) -> list[int]:
    """A list of ints from one, or from an integer tensor of rank 1 (one on a device is waited for).

    Raises:
        FormatError: neither.
        BatchError: below 0 or beyond int32.
    """
    if isinstance(values, torch.Tensor):
        if values.dim() != 1 or values.dtype not in (torch.int32, torch.int64):
            got = f"{values.dtype} {list(values.shape)}"
            raise FormatError(f"{what}: {name} is {got}, expected int32 or int64 of rank 1")
        values = values.tolist()
    found = list(values)
    for value in found:
        if isinstance(value, bool) or not isinstance(value, int):
            raise FormatError(f"{what}: {name} has {value!r}, expected ints")
        if not 0 <= value <= LARGEST:
            raise BatchError(f"{what}: {name} has {value}, expected from 0 to {LARGEST}")
    return found


def check_positive(what: str, name: str, value: int) -> None:
    """Raises OptionError unless `value` is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{what}: {name} is {value!r}, expected an int of at least 1")

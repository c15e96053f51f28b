"""Argument checks of the functional API: each message says what was checked, what it got and what would be right."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

import torch

from flowlib.core.errors import BatchError, FormatError, OptionError, ShapeError

Alpha = float | torch.Tensor
"""One alpha, or one per row or query head as a tensor."""


def number(what: str, name: str, value: object, expected: str, lowest: float = -math.inf) -> float:
    """`value` as a float of at least `lowest`.

    Raises:
        OptionError: it is no finite number, or too small.
    """
    good = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(float(value))
    if not good or float(value) < lowest:  # type: ignore[arg-type]
        raise OptionError(f"{what}: {name} is {value!r}, expected {expected}")
    return float(value)  # type: ignore[arg-type]


def count(what: str, name: str, value: object, lowest: int) -> int:
    """`value` as an integer of at least `lowest`.

    Raises:
        OptionError: it is no integer, or too small.
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or int(value) < lowest:
        raise OptionError(f"{what}: {name} is {value!r}, expected an integer of at least {lowest}")
    return int(value)


def power_of_two(what: str, name: str, value: object) -> int:
    """`value` as a positive power of two.

    Raises:
        OptionError: it is none.
    """
    good = isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1
    if not good or int(value) & (int(value) - 1):  # type: ignore[arg-type]
        raise OptionError(f"{what}: {name} is {value!r}, expected a positive power of two")
    return int(value)  # type: ignore[arg-type]


def alphas(
    what: str, alpha: object, shape: Sequence[int], device: torch.device, *, above_one: bool = False
) -> torch.Tensor:
    """`alpha` as float64 of `shape`.

    Args:
        what: the function that asks.
        alpha: a number, or a tensor that broadcasts to `shape`.
        shape: of the rows, or ``[H_q]``.
        device: where the result lies.
        above_one: whether 1, which has no zeros, is refused.

    Raises:
        OptionError: a value is out of range. FormatError, ShapeError: the tensor has the wrong dtype or shape.
    """
    expected = "a number above 1 and at most 2" if above_one else "a number from 1 to 2"
    if not isinstance(alpha, torch.Tensor):
        value = number(what, "alpha", alpha, expected)
        _in_range(what, value, value, expected, above_one)
        return torch.full(tuple(shape), value, dtype=torch.float64, device=device)
    if not alpha.is_floating_point() or alpha.requires_grad:
        got = f"{alpha.dtype} with requires_grad" if alpha.requires_grad else str(alpha.dtype)
        raise FormatError(f"{what}: alpha is {got}, expected a floating tensor without gradient")
    there = alpha.detach().to(device, torch.float64)
    looked_at = there if device.type == "cpu" else alpha  # a copy to the CPU is the only thing that waits
    if alpha.numel():
        _in_range(what, float(looked_at.min()), float(looked_at.max()), expected, above_one)
    return broadcast(what, "alpha", there, shape)


def _in_range(what: str, low: float, high: float, expected: str, above_one: bool) -> None:
    value = low if not low >= 1.0 or (above_one and low == 1.0) else high
    if not 1.0 <= value <= 2.0 or (above_one and value == 1.0):
        raise OptionError(f"{what}: alpha is {value}, expected {expected}")


def broadcast(what: str, name: str, value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """`value` broadcast to `shape`.

    Raises:
        ShapeError: it does not broadcast to it.
    """
    padded = (1,) * (len(shape) - value.dim()) + tuple(value.shape)
    if len(padded) != len(shape) or any(have not in (1, want) for have, want in zip(padded, shape, strict=True)):
        raise ShapeError(f"{what}: {name} is {list(value.shape)}, expected a shape that broadcasts to {list(shape)}")
    return value.expand(tuple(shape))


def floating(what: str, name: str, value: object, axes: str | None = None) -> torch.Tensor:
    """`value` as a floating tensor with the named axes.

    Raises:
        FormatError: it is no tensor of float16, bfloat16, float32 or float64. ShapeError: the rank is wrong.
    """
    if not isinstance(value, torch.Tensor):
        raise FormatError(f"{what}: {name} is {type(value).__name__}, expected a floating tensor")
    if value.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise FormatError(f"{what}: {name} is {value.dtype}, expected float16, bfloat16, float32 or float64")
    if axes is not None and value.dim() != len(axes.split(",")):
        raise ShapeError(f"{what}: {name} is {list(value.shape)}, expected [{axes}]")
    return value


def int32(what: str, name: str, value: object, shape: Sequence[int | None]) -> torch.Tensor:
    """`value` as an int32 tensor of `shape`; ``None`` takes any size.

    Raises:
        FormatError: it is no int32 tensor. ShapeError: an axis has the wrong size.
    """
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.int32:
        got = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise FormatError(f"{what}: {name} is {got}, expected an int32 tensor")
    fits = value.dim() == len(shape)
    if not fits or any(want not in (None, have) for have, want in zip(value.shape, shape, strict=True)):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ShapeError(f"{what}: {name} is {list(value.shape)}, expected [{wanted}]")
    return value


def same_shape(what: str, name: str, value: torch.Tensor, shape: Sequence[int], like: str) -> None:
    """Checks a shape.

    Raises:
        ShapeError: `value` is not of `shape`.
    """
    if tuple(value.shape) != tuple(shape):
        raise ShapeError(f"{what}: {name} is {list(value.shape)}, expected {list(shape)} {like}")


def group_of(what: str, query_heads: int, kv_heads: int) -> int:
    """Query heads of one kv head.

    Raises:
        ShapeError: `query_heads` is no multiple of `kv_heads`.
    """
    if kv_heads < 1 or query_heads < 1 or query_heads % kv_heads:
        raise ShapeError(f"{what}: q has {query_heads} heads, expected a multiple of the {kv_heads} kv heads")
    return query_heads // kv_heads


def slopes_of(what: str, alibi_slopes: object, heads: int, like: torch.Tensor) -> torch.Tensor:
    """ALiBi slopes ``[heads]`` in the dtype of `like`; ``None`` gives zeros.

    Raises:
        FormatError: no tensor or sequence of numbers. ShapeError: not one for each query head.
    """
    if alibi_slopes is None:
        return like.new_zeros(heads)
    if not isinstance(alibi_slopes, torch.Tensor):
        if not isinstance(alibi_slopes, Sequence):
            raise FormatError(f"{what}: alibi_slopes is {type(alibi_slopes).__name__}, expected a floating tensor")
        values = [number(what, "a value of alibi_slopes", s, "a finite number") for s in alibi_slopes]
        alibi_slopes = torch.tensor(values, dtype=torch.float64)
    floating(what, "alibi_slopes", alibi_slopes)
    if tuple(alibi_slopes.shape) != (heads,):
        raise ShapeError(
            f"{what}: alibi_slopes is {list(alibi_slopes.shape)}, expected [{heads}], one for each query head"
        )
    return alibi_slopes.to(like)


def lengths(what: str, seq_lens: object, rows: int, capacity: int) -> torch.Tensor:
    """`seq_lens` as int32 ``[rows]``, each from 0 to `capacity` (checked on CPU tensors only: a device would wait).

    Raises:
        FormatError, ShapeError: wrong dtype or shape. BatchError: a length is out of range.
    """
    checked = int32(what, "seq_lens", seq_lens, [rows])
    if checked.device.type == "cpu" and checked.numel():
        low, high = int(checked.min()), int(checked.max())
        if low < 0 or high > capacity:
            got = low if low < 0 else high
            raise BatchError(f"{what}: seq_lens has {got}, expected from 0 to {capacity}, what the pages hold")
    return checked


def computed_in(*values: torch.Tensor) -> torch.dtype:
    """The dtype that formulas run in: float64 if one of the tensors is, else float32."""
    return torch.float64 if any(x.dtype is torch.float64 for x in values) else torch.float32

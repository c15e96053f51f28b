"""K, V and the fields of a flow, in pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from flowlib.core import float8
from flowlib.core.errors import BatchError, FormatError, OptionError, ShapeError

if TYPE_CHECKING:
    from flowlib.core.spec import Spec
    from flowlib.runtime.plan import Plan

SATURATED = "saturated bounds"
"""Name of the counter among a store's operands; no field can have it."""


class KVStore:
    """A view of K, V and fields that somebody owns; nothing is copied.

    Args:
        plan: the plan whose fields they are.
        k, v: ``[num_pages * page_size, H_kv, D]`` and ``[.., H_kv, Dv]`` in ``spec.kv_dtype``, last axis contiguous.
            With MLA, k is the latent ``[num_pages * page_size, 1, kv_lora_rank + qk_rope_head_dim]`` and v is ``None``:
            it becomes the view of the latent's first ``kv_lora_rank`` channels.
        fields: name to ``[num_pages, H_kv, r, c]``, contiguous, in the field's dtype.
        field_scales: fp32 ``[H_kv]``, powers of two: what float8 summaries are multiplied by; ``None`` means
            ``spec.summary_scale`` for every kv head.

    Attributes:
        given: the fields that the pool gives to flows: k and v, or the latent.
        operands: what generated kernels read and write beside K and V: float8 summaries as uint8 codes, their scales.
        saturated: int64 ``[1]``, float8 bounds that updates had to cut, see :meth:`saturated_bounds`. It is ``None``
            where the plan has no float8 summary, as `field_scales` then is.

    Raises:
        ShapeError, FormatError, BatchError: a tensor does not fit the plan or the others; the message names it.
        OptionError: a scale is no power of two (checked on CPU tensors only: on a device it would wait for it).
    """

    def __init__(
        self,
        plan: Plan,
        k: torch.Tensor,
        v: torch.Tensor | None,
        fields: Mapping[str, torch.Tensor],
        field_scales: torch.Tensor | None = None,
    ) -> None:
        spec = plan.spec
        self.given = _given("KVStore", spec, k, v)
        for name, value in {**self.given, **fields}.items():
            _check_device("KVStore", name, value, k.device)
        self.plan = plan
        self.num_pages = k.shape[0] // spec.page_size
        for name, value in self.given.items():
            size = spec.dv if name == "v" else spec.head_dim
            _check_storage(name, value, (k.shape[0], spec.num_kv_heads, size), spec.kv_dtype)
        if set(fields) != set(plan.fields):
            raise ShapeError(f"KVStore: fields are {sorted(fields)}, expected {sorted(plan.fields)}")
        for name, field in plan.fields.items():
            _check_storage(name, fields[name], (self.num_pages, spec.num_kv_heads, *field.shape), field.dtype)
            if not fields[name].is_contiguous():
                raise FormatError(f"KVStore: field {name!r} is not contiguous")
        self.k = k
        self.v = k[..., : spec.dv] if v is None else v
        self.fields = dict(fields)
        self.operands: dict[str, torch.Tensor] = self.fields
        self.field_scales, self.saturated = None, None
        if plan.scaled_fields:
            self._keep_scales(field_scales)
        elif field_scales is not None:
            raise FormatError("KVStore: field_scales is given, but no field of the plan is a float8 summary")

    def _keep_scales(self, given: torch.Tensor | None) -> None:
        spec, device = self.plan.spec, self.device
        if given is None:
            given = torch.full((spec.num_kv_heads,), spec.summary_scale, dtype=torch.float32, device=device)
        self.field_scales = _checked_scales(given, spec.num_kv_heads, device)
        self.saturated = torch.zeros(1, dtype=torch.int64, device=device)
        codes = {n: self.fields[n].view(torch.uint8) for n in self.plan.scaled_fields}
        self.operands = {**self.fields, **codes, float8.SCALES: self.field_scales, SATURATED: self.saturated}

    def values(self, name: str) -> torch.Tensor:
        """What a field stands for, ``[num_pages, H_kv, r, c]``: the field itself, or a float8 summary times its scale,
        exactly, in bfloat16."""
        field = self.fields[name]
        if not self.plan.fields[name].rounding:
            return field
        return float8.decode(field, self.scales_of(torch.bfloat16), torch.bfloat16)

    def scales_of(self, dtype: torch.dtype) -> torch.Tensor:
        """The scales of float8 summaries in `dtype`, ``[1, H_kv, 1, 1]``.

        Raises:
            FormatError: the plan has no such field.
        """
        if self.field_scales is None:
            raise FormatError("KVStore: no field of the plan is a float8 summary, so there are no scales")
        return self.field_scales.to(dtype)[None, :, None, None]

    def saturated_bounds(self) -> int:
        """How many values of float8 bounds (maxima, minima) were cut since the pool was made; waits for the device.

        A maximum above 448 times its scale is stored as 448 times its scale, and is a bound no more; a minimum below
        -448 times its scale likewise. A larger scale avoids it. 0 for a plan without float8 summaries.
        """
        return 0 if self.saturated is None else int(self.saturated)

    @property
    def latent(self) -> torch.Tensor:
        """Latents ``[num_pages * page_size, 1, kv_lora_rank + qk_rope_head_dim]``. Raises FormatError without MLA."""
        if "latent" not in self.given:
            raise FormatError("KVStore: there is no latent, the plan's spec has no kv_lora_rank; use k and v")
        return self.given["latent"]

    @property
    def device(self) -> torch.device:
        """Where K lies."""
        return self.k.device

    def refresh(self, pages: torch.Tensor, impl: str = "reference") -> None:
        """Recomputes the fields of some pages after a rewrite that missed a page's last slot.

        Args:
            pages: int64 ``[n]``, physical pages.
            impl: ``"reference"`` or ``"triton"``.

        Raises:
            BatchError: `pages` is no such tensor, or a page is not in the pool.
        """
        size = self.plan.spec.page_size
        check_integers("refresh: pages", pages, "n", self.num_pages, self.device)
        self.plan.update(self, pages.to(torch.int64) * size + size - 1, impl=impl)

    def write(self, k: torch.Tensor, v: torch.Tensor | None, loc: torch.Tensor, impl: str = "reference") -> None:
        """Stores K and V of some tokens, then runs ``forward_cache`` for the pages they finish.

        Args:
            k, v: ``[T, H_kv, D]`` and ``[T, H_kv, Dv]`` in a floating dtype; divided by k_scale and v_scale when the
                pool is float8. With MLA, k is the latents ``[T, 1, D]`` (or ``[T, D]``) and v is ``None``.
            loc: int64 ``[T]`` token slots, ``physical page * page_size + slot``.
            impl: ``"reference"`` or ``"triton"``.

        Raises:
            ShapeError, FormatError, BatchError: nothing is stored.
        """
        spec = self.plan.spec
        check_integers("write: loc", loc, "T", self.num_pages * spec.page_size, self.device)
        if spec.is_mla and isinstance(k, torch.Tensor) and k.dim() == 2:
            k = k[:, None]
        given = _given("write", spec, k, v)
        for name, value in given.items():
            size = spec.dv if name == "v" else spec.head_dim
            _check_written(name, value, (len(loc), spec.num_kv_heads, size), self.device)
        self.plan.prepare(impl, self.device)
        slots = loc.to(torch.int64).contiguous()
        stored = {
            n: _stored(x, spec.v_scale if n == "v" else spec.k_scale, spec.kv_dtype) for n, x in given.items()
        }
        for name, value in stored.items():
            self.given[name][slots] = value
        self.plan.update(self, slots, impl=impl)


class PagedPool(KVStore):
    """K, V and the flow's fields in memory of its own; every page id is ordinary.

    Args:
        plan: the plan whose fields are kept.
        num_pages: pages in the pool.
        device: where it lies.
        field_scales: as for :class:`KVStore`.
    """

    def __init__(
        self,
        plan: Plan,
        num_pages: int,
        device: str | torch.device = "cpu",
        field_scales: torch.Tensor | None = None,
    ) -> None:
        if num_pages < 1:
            raise BatchError(f"PagedPool: num_pages is {num_pages}, expected at least 1")
        spec = plan.spec
        tokens = num_pages * spec.page_size
        k = torch.zeros(tokens, spec.num_kv_heads, spec.head_dim, dtype=spec.kv_dtype, device=device)
        v = None
        if not spec.is_mla:
            v = torch.zeros(tokens, spec.num_kv_heads, spec.dv, dtype=spec.kv_dtype, device=device)
        super().__init__(plan, k, v, allocate_fields(plan, num_pages, device), field_scales)

    def clone(self) -> PagedPool:
        """A copy with storage of its own."""
        twin = object.__new__(PagedPool)
        fields = {n: f.clone() for n, f in self.fields.items()}
        scales = None if self.field_scales is None else self.field_scales.clone()
        v = self.v.clone() if "v" in self.given else None
        KVStore.__init__(twin, self.plan, self.k.clone(), v, fields, scales)
        if twin.saturated is not None and self.saturated is not None:
            twin.saturated.copy_(self.saturated)
        return twin


def allocate_fields(plan: Plan, num_pages: int, device: str | torch.device) -> dict[str, torch.Tensor]:
    """Zeroed storage of the plan's fields for one layer: name to ``[num_pages, H_kv, r, c]``."""
    heads = plan.spec.num_kv_heads
    return {f.name: torch.zeros(num_pages, heads, *f.shape, dtype=f.dtype, device=device) for f in plan.fields.values()}


def _given(what: str, spec: Spec, k: torch.Tensor, v: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """K and V, or the latent, by the name of their given field. Raises FormatError where `v` does not fit the spec."""
    if spec.is_mla:
        if v is not None:
            got = f"a tensor {list(v.shape)}" if isinstance(v, torch.Tensor) else type(v).__name__
            raise FormatError(f"{what}: 'v' is {got}, expected None: with MLA, V is part of the latents given as 'k'")
        return {"latent": k}
    return {"k": k, "v": v}  # type: ignore[dict-item]


def _checked_scales(scales: object, heads: int, device: torch.device) -> torch.Tensor:
    if not isinstance(scales, torch.Tensor) or scales.dtype is not torch.float32 or tuple(scales.shape) != (heads,):
        got = f"{scales.dtype} {list(scales.shape)}" if isinstance(scales, torch.Tensor) else type(scales).__name__
        raise FormatError(f"KVStore: field_scales is {got}, expected torch.float32 [{heads}], one per kv head")
    _check_device("KVStore", "field_scales", scales, device)
    low, high = float8.SCALE_EXPONENTS
    for value in scales.tolist() if device.type == "cpu" else ():
        if not float8.is_scale(value):
            raise OptionError(f"KVStore: field_scales has {value}, expected powers of two from 2**{low} to 2**{high}")
    return scales.contiguous()


def _stored(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    if dtype is not torch.float8_e4m3fn:
        return x.to(dtype)
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype)


def _check_storage(name: str, value: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(value.shape) != shape:
        raise ShapeError(f"KVStore: '{name}' is {list(value.shape)}, expected {list(shape)}")
    if value.dtype is not dtype:
        raise FormatError(f"KVStore: '{name}' is {value.dtype}, expected {dtype}")
    if value.stride(-1) != 1 and value.shape[-1] != 1:
        raise FormatError(f"KVStore: the last axis of '{name}' has stride {value.stride(-1)}, expected 1")


def _check_written(name: str, value: object, shape: tuple[int, ...], device: torch.device) -> None:
    if not isinstance(value, torch.Tensor):
        raise FormatError(f"write: '{name}' is {type(value).__name__}, expected a tensor {list(shape)} [T, H_kv, D]")
    if tuple(value.shape) != shape:
        raise ShapeError(f"write: '{name}' is {list(value.shape)}, expected {list(shape)} [T, H_kv, D]")
    if not value.is_floating_point():
        raise FormatError(f"write: '{name}' is {value.dtype}, expected a floating dtype")
    _check_device("write", name, value, device)


def _check_device(what: str, name: str, value: torch.Tensor, device: torch.device) -> None:
    if value.device != device:
        raise BatchError(f"{what}: '{name}' is on {value.device}, expected {device}, where the pool's K lies")


def check_integers(
    what: str, values: torch.Tensor, axis: str, limit: int, device: torch.device, lowest: int = 0
) -> None:
    """Checks slots or pages.

    Raises:
        BatchError: `values` is no integer tensor of rank 1 on `device`; or, on the CPU, has one outside
            ``[lowest, limit)`` (on a device that would wait for it).
    """
    good = isinstance(values, torch.Tensor) and values.dim() == 1 and values.dtype in (torch.int64, torch.int32)
    if not good:
        got = f"{values.dtype} {list(values.shape)}" if isinstance(values, torch.Tensor) else type(values).__name__
        raise BatchError(f"{what} is {got}, expected int64 [{axis}]")
    if values.device != device:
        raise BatchError(f"{what} is on {values.device}, expected {device}, where the pool lies")
    if values.device.type != "cpu" or values.numel() == 0:
        return
    low, high = int(values.min()), int(values.max())
    if low < lowest or high >= limit:
        raise BatchError(f"{what} has {low if low < lowest else high}, expected from {lowest} to {limit - 1}")

"""What ``--flow-config`` may say: parsing, checking and writing back.

Nothing here knows SGLang. Every message starts with ``--flow-config`` and names the key.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from flowlib.core.errors import OptionError, did_you_mean
from flowlib.core.float8 import SCALE_EXPONENTS, is_scale
from flowlib.core.spec import Spec

IMPLS = ("reference", "triton")
SUMMARY_DTYPES = {
    "auto": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
}
"""What ``summary_dtype`` may say, in SGLang's words."""
AUTO = "auto"
_SPEC_DEFAULTS: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Spec)}


@dataclass(frozen=True)
class TraceConfig:
    """What the trace writes.

    Args:
        path: the JSON-lines file; with tensor parallelism each rank adds ``.rankN`` to it.
        pages: also write the list of pages of each row and kv head.
        mass: also attend densely, and write which share of the dense attention mass the chosen pages hold.
    """

    path: str
    pages: bool = False
    mass: bool = False


@dataclass(frozen=True)
class FlowConfig:
    """The budget and the options of a served flow. Pages are SGLang's pages of ``page_size`` tokens.

    Args:
        top_k, top_k_ratio, bos, eos: as in :class:`flowlib.core.spec.Spec`, and with its defaults.
        dense_below: requests of at most so many tokens attend to everything; ``auto`` is the length up to which that is
            faster with the same kernels; 0 for the reference, for flows that must score every request and for flows
            over MLA latents, for which that length was not measured.
        options: keyword arguments of the flow.
        dense_layers: ids of the layers that attend to everything.
        module_path: the Python file that registers the flow, when it is not a built-in one.
        impl: ``triton`` or ``reference``; ``None`` means Triton on a GPU and the reference on a CPU.
        trace: what to write about each decode step; ``None`` writes nothing and costs nothing.
        summary_dtype: dtype of the flow's summary fields; ``auto`` is that of the KV pool, bf16 beside an fp8 pool.
            ``fp8_e4m3`` halves what scoring reads of a bf16 pool's fields.
        summary_scale: what fp8 summaries are multiplied by, a power of two: 448 times it is the largest bound.
    """

    top_k: int = _SPEC_DEFAULTS["top_k"]
    top_k_ratio: float = _SPEC_DEFAULTS["top_k_ratio"]
    bos: int = _SPEC_DEFAULTS["bos"]
    eos: int = _SPEC_DEFAULTS["eos"]
    options: Mapping[str, Any] = field(default_factory=dict)
    dense_layers: tuple[int, ...] = ()
    module_path: str | None = None
    impl: str | None = None
    dense_below: int | str = AUTO
    trace: TraceConfig | None = None
    summary_dtype: str = "auto"
    summary_scale: float = _SPEC_DEFAULTS["summary_scale"]

    def __post_init__(self) -> None:
        _integer("top_k", self.top_k, 0)
        _integer("bos", self.bos, 0)
        _integer("eos", self.eos, 1, "the unfinished last page has no summary, so it is always attended")
        if self.dense_below != AUTO:
            _integer("dense_below", self.dense_below, 0, f"or {AUTO!r}")
        _ratio("top_k_ratio", self.top_k_ratio)
        if not isinstance(self.options, Mapping):
            raise _wrong("options", self.options, "an object of the flow's options")
        object.__setattr__(self, "dense_layers", _layer_ids(self.dense_layers))
        if self.module_path is not None and not isinstance(self.module_path, str):
            raise _wrong("module_path", self.module_path, "the path of a Python file")
        if self.impl is not None and self.impl not in IMPLS:
            raise _wrong("impl", self.impl, " or ".join(repr(name) for name in IMPLS))
        object.__setattr__(self, "trace", _trace(self.trace))
        self._check_summaries()

    def _check_summaries(self) -> None:
        if not isinstance(self.summary_dtype, str) or self.summary_dtype not in SUMMARY_DTYPES:
            raise _wrong("summary_dtype", self.summary_dtype, "one of " + ", ".join(SUMMARY_DTYPES))
        scale = self.summary_scale
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not is_scale(scale):
            low, high = SCALE_EXPONENTS
            raise _wrong("summary_scale", scale, f"a power of two from 2**{low} to 2**{high}")
        if scale != 1 and self.summary_dtype != "fp8_e4m3":
            raise _wrong("summary_scale", scale, "1.0 unless summary_dtype is 'fp8_e4m3'")

    @classmethod
    def parse(cls, value: str | Mapping[str, Any] | None) -> "FlowConfig":
        """Reads the flag's JSON text or the keyword's mapping; ``None`` gives the defaults.

        Raises:
            OptionError: the text is no JSON object, or a key is unknown, of the wrong type or out of range.
        """
        if value is None:
            return cls()
        data = _from_json(value) if isinstance(value, str) else value
        if not isinstance(data, Mapping):
            raise OptionError(f'--flow-config is {data!r}, expected a JSON object such as {{"top_k": 16}}')
        known = [f.name for f in dataclasses.fields(cls)]
        _no_unknown_keys("", data, known)
        return cls(**data)

    def to_json(self) -> str:
        """The same as JSON text, without the keys that keep their defaults."""
        default = FlowConfig()
        said = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        said = {name: value for name, value in said.items() if value != getattr(default, name)}
        if self.trace is not None:
            said["trace"] = dataclasses.asdict(self.trace)
        try:
            return json.dumps({name: dict(v) if isinstance(v, Mapping) else v for name, v in said.items()})
        except (TypeError, ValueError) as error:
            raise OptionError(
                f"--flow-config: options {self.options} can't be handed to SGLang's processes: {error}; "
                "give numbers, texts, lists and dicts"
            ) from error

    def summary_numbers(self) -> dict[str, Any]:
        """What a :class:`Spec` takes for the flow's summary fields."""
        return {"summary_dtype": SUMMARY_DTYPES[self.summary_dtype], "summary_scale": float(self.summary_scale)}

    def budget_numbers(self) -> dict[str, Any]:
        """What a :class:`Spec` takes for the budget."""
        return {name: getattr(self, name) for name in ("top_k", "top_k_ratio", "bos", "eos")}


def _from_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise OptionError(f"--flow-config is not JSON: {error.msg} at {where}: {text!r}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name, value in pairs:
        if name in seen:
            raise OptionError(f"--flow-config: key {name!r} is given twice")
        seen[name] = value
    return seen


def _no_unknown_keys(inside: str, data: Mapping[str, Any], known: list[str]) -> None:
    for name in data:
        if name not in known:
            place = f" in {inside!r}" if inside else ""
            near = did_you_mean(str(name), known)
            raise OptionError(f"--flow-config: unknown key {name!r}{place}, expected one of {', '.join(known)}.{near}")


def _trace(value: Any) -> TraceConfig | None:
    if value is None or isinstance(value, TraceConfig):
        return value
    if isinstance(value, str):
        value = {"path": value}
    if not isinstance(value, Mapping):
        raise _wrong("trace", value, 'a path or an object such as {"path": "trace.jsonl", "pages": true}')
    _no_unknown_keys("trace", value, [f.name for f in dataclasses.fields(TraceConfig)])
    if not isinstance(value.get("path"), str) or not value["path"]:
        raise _wrong("trace.path", value.get("path"), "the path of the file to write")
    for name in ("pages", "mass"):
        if not isinstance(value.get(name, False), bool):
            raise _wrong(f"trace.{name}", value[name], "true or false")
    return TraceConfig(**value)


def _layer_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise _wrong("dense_layers", value, "a list of layer ids such as [0, 1]")
    for item in value:
        _integer("dense_layers", item, 0)
    return tuple(sorted(set(value)))


def _integer(name: str, value: Any, low: int, why: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise _wrong(name, value, f"an integer of at least {low}" + (f" ({why})" if why else ""))


def _ratio(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
        raise _wrong(name, value, "a number from 0 to 1")


def _wrong(name: str, value: Any, wanted: str) -> OptionError:
    return OptionError(f"--flow-config: {name} is {value!r}, expected {wanted}")

"""What `bench_decode.py` measures: shapes, flows, and the numbers of a spec."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass

import torch

import flowlib

SHAPES = ("16x32k", "16x128k", "64x32k", "1x128k", "16x8k", "16x2048", "1x2048", "1x32k", "64x8k")
"""Batch x context, the most telling first; the budget covers a context of 2,048 tokens."""
QUICK_SHAPES = ("16x32k", "1x128k", "16x2048")
FLOAT8 = "+fp8"
"""What ends the name of a flow whose summaries are float8."""
_NAMES = ("gqa_quest_sparse_attention", "block_sparse_attention")
FLOWS = tuple(name + end for name in _NAMES for end in ("", FLOAT8))
RAGGED = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Contexts of a ragged batch in units of 1,024 tokens, taken in turn."""
VARIANTS: tuple[tuple[str, dict[str, int]], ...] = (
    ("16xragged", {}),
    *((f"16x{n}k", {"group_size": g}) for n in (32,) for g in (1, 3, 7, 8)),
    ("16x32k", {"head_dim": 64}),
    *(("16x32k", {"page_size": p}) for p in (1, 32, 64)),
)
"""Shapes and changed numbers of `--also`; a page of another size gets a budget of as many tokens."""


class BenchError(Exception):
    """A request that can't be measured; the message says what was asked and what would be right."""


@dataclass(frozen=True)
class Numbers:
    """The numbers of the model and of the budget; see :class:`flowlib.Spec`."""

    group_size: int = 4
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    top_k: int = 128
    bos: int = 1
    eos: int = 1


@dataclass(frozen=True)
class Workload:
    """A batch for one spec.

    Args:
        shape: in the spelling of :func:`canonical`.
        lengths: tokens of each request, the query token among them.
        numbers: of the model and the budget.
        standard: whether the goals hold for these numbers.
    """

    shape: str
    lengths: tuple[int, ...]
    numbers: Numbers
    standard: bool = True

    @property
    def pages(self) -> tuple[int, ...]:
        """Pages of each request."""
        return tuple(-(-n // self.numbers.page_size) for n in self.lengths)

    @property
    def label(self) -> str:
        """Batch x context, and what is unlike the standard numbers."""
        if len(set(self.lengths)) == 1:
            text = f"{len(self.lengths)} x {self.lengths[0]:,}"
        else:
            text = f"{len(self.lengths)} x {min(self.lengths):,} to {max(self.lengths):,}"
        usual, own = dataclasses.asdict(Numbers()), dataclasses.asdict(self.numbers)
        names = {"group_size": "group", "num_kv_heads": "kv heads", "head_dim": "head_dim", "page_size": "page"}
        return ", ".join([text, *(f"{names[k]} {own[k]}" for k in names if own[k] != usual[k])])

    def spec(self, **more: object) -> flowlib.Spec:
        """The spec of this workload, bf16."""
        given = {**dataclasses.asdict(self.numbers), "kv_dtype": torch.bfloat16, **more}
        return flowlib.Spec(max_pages=max(self.pages), max_batch=len(self.lengths), **given)  # type: ignore[arg-type]


@dataclass(frozen=True)
class FlowChoice:
    """A flow by name, with its options, and whether its summaries are float8."""

    name: str
    options: dict[str, object]
    float8: bool = False

    @property
    def label(self) -> str:
        """Name, options and dtype of the summaries."""
        inner = ", ".join(f"{k}={v}" for k, v in self.options.items())
        return (f"{self.name}({inner})" if inner else self.name) + (FLOAT8 if self.float8 else "")

    def plan(self, workload: Workload, **more: object) -> flowlib.Plan:
        """The flow's plan for a workload. Raises flowlib's errors."""
        summaries = {"summary_dtype": torch.float8_e4m3fn} if self.float8 else {}
        return flowlib.profile(self.build(), workload.spec(**summaries, **more))

    def build(self) -> flowlib.vFlow:
        """The flow. Raises UnknownFlowError, OptionError."""
        return flowlib.build(self.name, None, **self.options)


def parse_flow(text: str) -> FlowChoice:
    """``name`` or ``name:{"option": value}``, a name that ends in ``+fp8`` for float8 summaries.

    Raises:
        BenchError: the options are no JSON object.
    """
    name, _, options = text.partition(":")
    try:
        given = json.loads(options) if options else {}
    except json.JSONDecodeError as error:
        raise BenchError(f"--flow {text}: the options are no JSON ({error})") from error
    if not isinstance(given, dict):
        raise BenchError(f"--flow {text}: the options are {options}, expected a JSON object")
    return FlowChoice(name.removesuffix(FLOAT8), given, name.endswith(FLOAT8))


def parse_shape(text: str) -> tuple[int, ...]:
    """Tokens of each request of ``16x32k``, ``1x2048`` or ``16xragged``.

    Raises:
        BenchError: it is none of these.
    """
    match = re.fullmatch(r"(\d+)x(?:(\d+)(k?)|(ragged))", text.strip().lower())
    if not match or int(match[1]) < 1 or match[2] == "0":
        raise BenchError(f"--shape {text}: expected BATCHxCONTEXT such as 16x32k or 1x2048, or 16xragged")
    batch = int(match[1])
    if match[4]:
        return tuple(1024 * RAGGED[i % len(RAGGED)] for i in range(batch))
    return (int(match[2]) * (1024 if match[3] else 1),) * batch


def canonical(lengths: tuple[int, ...]) -> str:
    """The shape that :func:`parse_shape` takes for some lengths, in one spelling."""
    if len(set(lengths)) > 1:
        return f"{len(lengths)}xragged"
    n = lengths[0]
    return f"{len(lengths)}x{n // 1024}k" if n % 1024 == 0 and n >= 4096 else f"{len(lengths)}x{n}"


def workloads(shapes: tuple[str, ...], numbers: Numbers, also: bool) -> list[Workload]:
    """The shapes for `numbers`, then with `also` those of VARIANTS."""
    usual = numbers == Numbers()
    asked = [parse_shape(s) for s in shapes]
    made = [Workload(canonical(n), n, numbers, usual) for n in asked]
    for shape, change in VARIANTS if also else ():
        changed = dataclasses.replace(numbers, **change)
        if "page_size" in change:
            budget = max(1, numbers.top_k * numbers.page_size // changed.page_size)
            changed = dataclasses.replace(changed, top_k=budget)
        made.append(Workload(shape, parse_shape(shape), changed, usual and not change))
    return list(dict.fromkeys(made))

"""Fill, Add and Save called alone, outside a flow, on real vTensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from h2o_oracle import STATE, few_threads, ulp

import flowlib
from flowlib import FORMAT, as_vtensor
from flowlib.core.formats import Side
from flowlib.ops import Add, Fill, Save

TOUCHED = (3, 5, 11, 40)
PAGES, OLD = 64, 7.5
BOS, EOS, UNOWNED = 4, 8, 7
TOP = 32


@dataclass(frozen=True)
class Filled:
    """Which (page, kv head) entries of a pool of 7.5 are 0 after Fill, and whether all others kept their bytes."""

    page_size: int
    zeroed: list[int]
    others_kept: bool

    @property
    def ok(self) -> bool:
        """Exactly the touched pages are 0, for every kv head."""
        return self.zeroed == list(TOUCHED) and self.others_kept


def fill(page_size: int, device: str, impl: str, kv_heads: int = 2) -> Filled:
    """Fill(0.0) on the last slots of pages 3, 5, 11, 40; with larger pages also on inner slots of other pages."""
    spec = flowlib.Spec(page_size=page_size, num_kv_heads=kv_heads, max_pages=PAGES)
    plan = flowlib.profile(flowlib.build("block_sparse_attention"), spec)
    context = flowlib.RunContext(plan, flowlib.PagedPool(plan, PAGES, device), impl=impl, side=Side.CACHE)
    field = torch.full((PAGES * kv_heads, 1, 1), OLD, dtype=torch.bfloat16, device=device)
    last = [page * page_size + page_size - 1 for page in reversed(TOUCHED)]
    inner = [page * page_size + slot for page in (3, 4, 20) for slot in range(page_size - 1)]
    loc = torch.tensor(inner + last, dtype=torch.int64, device=device)
    Fill(0.0)(as_vtensor(field, FORMAT.PAGED, context), loc=loc, ctx=context)
    entries = field.cpu().view(PAGES, kv_heads)
    zero = (entries == 0).all(1)
    return Filled(page_size, zero.nonzero().flatten().tolist(), bool((entries[~zero] == OLD).all()))


def probabilities(tokens: int, steps: int, seed: int) -> torch.Tensor:
    """Attention probabilities, fp32 ``[steps, tokens]``: a stable affinity per token and noise of each step."""
    g = torch.Generator().manual_seed(seed)
    affinity = torch.randn(tokens, generator=g)
    return (affinity + 0.5 * torch.randn(steps, tokens, generator=g)).softmax(-1)


def exact(steps: Iterable[torch.Tensor], decay: float) -> torch.Tensor:
    """hh = probs + decay · hh in float64, of fp32 probabilities ``[n]``."""
    total = torch.zeros(())
    for probs in steps:
        total = probs.double() + decay * total.double()
    return total


class Field:
    """A field of one kv head behind a shuffled page table; reserved and unowned pages hold 7.5.

    Args:
        tokens: scored tokens of the row.
        dtype: the field's.
    """

    def __init__(self, tokens: int, dtype: torch.dtype, device: str, impl: str) -> None:
        width = BOS + tokens + EOS
        spec = flowlib.Spec(page_size=1, num_kv_heads=1, bos=BOS, eos=EOS, top_k=TOP, max_pages=width)
        plan = flowlib.profile(flowlib.build("h2o_token", state_dtype=dtype), spec)
        table = torch.randperm(width + UNOWNED, generator=torch.Generator().manual_seed(0))[:width]
        batch = flowlib.Batch(
            table[None].to(device, torch.int32), torch.tensor([width], dtype=torch.int32, device=device)
        )
        store = flowlib.PagedPool(plan, width + UNOWNED, device)
        self.context = flowlib.RunContext(plan, store, batch, impl=impl)
        self.pages = table[BOS : width - EOS]
        self.data = store.fields[STATE].view(-1, 1, 1)
        self.data.fill_(OLD)
        self.data[self.pages.to(device)] = 0
        self.width, self.device = width, device
        self.save = Save()

    def step(self, probs: torch.Tensor, decay: float) -> None:
        """Add and Save, one call each; entries of reserved pages hold NaN and must not be saved."""
        entries = torch.full((self.width, 1, 1), float("nan"))
        entries[BOS : self.width - EOS, 0, 0] = probs
        field = as_vtensor(self.data, FORMAT.PAGED, self.context)
        x = as_vtensor(entries.to(self.device), FORMAT.RAGGED, self.context)
        heavy = Add(alpha=1.0, beta=decay)(x, field, ctx=self.context)
        self.save(heavy, field, ctx=self.context)

    def scores(self) -> torch.Tensor:
        """The scored tokens' entries, ``[tokens]`` on the CPU."""
        return self.data.cpu()[self.pages, 0, 0].clone()

    def others_kept(self) -> bool:
        """Whether reserved and unowned pages still hold 7.5."""
        other = torch.ones(len(self.data), dtype=torch.bool)
        other[self.pages] = False
        return bool((self.data.cpu()[other] == OLD).all())


@dataclass(frozen=True)
class Accumulated:
    """Add and Save over many steps against float64.

    Attributes:
        error: L2 distance over the exact norm.
        largest, exact_largest: largest entry of the field, and of the exact sum.
        ratio: exact scores of the field's top-32 over the best possible sum.
        must_move: tokens whose exact score another last step changes by more than one ulp of the field.
        moved: how many of them another last step moves in the field.
        others_kept: whether pages that are not scored kept their bytes.
    """

    decay: float
    error: float
    largest: float
    exact_largest: float
    ratio: float
    must_move: int
    moved: int
    others_kept: bool


def accumulate(
    decay: float, device: str, impl: str, tokens: int = 128, steps: int = 800, seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Accumulated:  # fmt: skip
    """`steps` steps of Add and Save, then the last one once more with its probabilities in reverse order."""
    probs = probabilities(tokens, steps, seed)
    field = Field(tokens, dtype, device, impl)
    with few_threads(device):
        for one in probs[:-1]:
            field.step(one, decay)
        before = field.data.clone()
        field.step(probs[-1], decay)
        got, kept = field.scores(), field.others_kept()
        field.data.copy_(before)
        field.step(probs[-1].flip(0), decay)
        changed = field.scores()
    wanted = exact(probs, decay)
    top = min(TOP, tokens)
    picked = wanted[got.double().topk(top).indices].sum() / wanted.topk(top).values.sum()
    difference = (probs[-1] - probs[-1].flip(0)).double().abs()
    clear = difference > ulp(torch.maximum(got, changed).double(), dtype)
    return Accumulated(
        decay, float((got.double() - wanted).norm() / wanted.norm()), float(got.max()), float(wanted.max()),
        float(picked), int(clear.sum()), int((got != changed)[clear].sum()), kept,
    )  # fmt: skip

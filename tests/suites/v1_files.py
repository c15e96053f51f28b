"""Flow files written in the style of vortex_torch's public flow language, and the change of their imports."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tests.processes import ROOT


@dataclass(frozen=True)
class File:
    """A flow file.

    Attributes:
        text: as it would be written there.
        built_in: the built-in flow that does the same.
        options: its options for that.
    """

    text: str
    built_in: str
    options: dict[str, object] = field(default_factory=dict)


def import_table() -> dict[str, str]:
    """The module names there and here, from the first table of docs/migration.md."""
    page = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| `(vortex_torch[\w.]*)` \| `(flowlib[\w.]*)` \|", page, re.M))


def migrated(text: str) -> str:
    """The file with the modules of its import lines changed, and nothing else."""
    table = import_table()
    return re.sub(r"^from (vortex_torch[\w.]*) import", lambda m: f"from {table[m[1]]} import", text, flags=re.M)


QUEST = '''\
import torch
from typing import Dict

from vortex_torch.flow import vFlow, register
from vortex_torch.indexer import topK, Multiply, Maximum, Sum, Max
from vortex_torch.cache import Max as CMax, Min as CMin
from vortex_torch.abs import ContextBase


@register("my_quest")
class MyQuest(vFlow):
    """An upper bound of every score in a page, per query head."""

    def __init__(self):
        super().__init__()
        self.times_high = Multiply()
        self.times_low = Multiply()
        self.larger = Maximum()
        self.over_channels = Sum(dim=2)
        self.over_heads = Max(dim=1)
        self.output_func = topK()
        self.high = CMax(dim=1)
        self.low = CMin(dim=1)

    def forward_indexer(self, q: torch.Tensor, o: torch.Tensor, cache: Dict[str, torch.Tensor], ctx: ContextBase):
        high = self.times_high(q, cache["k_max"], ctx=ctx)
        low = self.times_low(q, cache["k_min"], ctx=ctx)
        bound = self.over_channels(self.larger(high, low, ctx=ctx), ctx=ctx)
        self.output_func(self.over_heads(bound, ctx=ctx), o, ctx=ctx)

    def forward_cache(self, cache: Dict[str, torch.Tensor], loc: torch.Tensor, ctx: ContextBase):
        self.high(cache["k"], cache["k_max"], loc=loc, ctx=ctx)
        self.low(cache["k"], cache["k_min"], loc=loc, ctx=ctx)

    def create_cache(self, page_size: int, head_dim: int):
        return {"k_max": (1, head_dim), "k_min": (1, head_dim)}
'''

RUNNING_AVERAGE = '''\
from vortex_torch.flow import vFlow, register
from vortex_torch.indexer import Mean, GeMM, Load, Add, Save, topK
from vortex_torch.cache import Mean as CMean, Fill as CFill


@register("my_running_average")
class MyRunningAverage(vFlow):
    """The score of a page remembers the steps before."""

    MOMENTUM = 0.5

    def __init__(self):
        super().__init__()
        self.q_mean = Mean(dim=1)
        self.dot = GeMM()
        self.before = Load()
        self.mix = Add(alpha=self.MOMENTUM, beta=1.0)
        self.keep = Save()
        self.output_func = topK()
        self.k_mean = CMean(dim=1)
        self.reset = CFill(alpha=0.0)

    def create_cache(self, block_size: int, head_dim: int):
        return {"centroid": (1, head_dim), "running": (1, 1)}

    def forward_cache(self, cache, loc, ctx):
        self.k_mean(cache["k"], cache["centroid"], loc=loc, ctx=ctx)
        self.reset(cache["running"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        score = self.dot(self.q_mean(q, ctx=ctx), cache["centroid"], ctx=ctx)
        running = self.mix(self.before(cache["running"], ctx=ctx), score, ctx=ctx)
        self.keep(running, cache["running"], ctx=ctx)
        self.output_func(running, o, ctx=ctx)
'''

GATED_CENTROID = '''\
from vortex_torch.flow import vFlow, register
from vortex_torch.abs import ContextBase
from vortex_torch.indexer import (
    topK, GeMV, Multiply,
)
from vortex_torch.cache import (
    Mean as CMean,
    L2Norm as CL2Norm,
)


@register("my_gated_centroid")
class MyGatedCentroid(vFlow):
    """The mean key, gated by how large the values of the page are."""

    def __init__(self):
        super().__init__()
        self.dot, self.gate, self.output_func = GeMV(), Multiply(), topK()
        self.k_mean, self.v_norm, self.v_mean = CMean(dim=1), CL2Norm(dim=2), CMean(dim=1)

    def create_cache(self, block_size: int, head_dim: int):
        return {"centroid": (1, head_dim), "v_energy": (1, 1)}

    def forward_cache(self, cache, loc, ctx: ContextBase):
        self.k_mean(cache["k"], cache["centroid"], loc=loc, ctx=ctx)
        norms = self.v_norm(cache["v"], None, loc=loc, ctx=ctx)
        self.v_mean(norms, cache["v_energy"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx: ContextBase):
        score = self.dot(q.mean(dim=1, keepdim=True), cache["centroid"], ctx=ctx)
        self.output_func(self.gate(score, cache["v_energy"], ctx=ctx), o, ctx=ctx)
'''

SOFTMAX_FOR_ITS_EFFECT = '''\
from vortex_torch.flow import vFlow, register
from vortex_torch.indexer import topK, GeMM, Softmax, Max
from vortex_torch.cache import Mean as CMean


@register("my_block_sparse")
class MyBlockSparse(vFlow):
    """Softmax over pages in place, as the first version of the language calls it."""

    def __init__(self):
        super().__init__()
        self.dot, self.softmax, self.over_heads = GeMM(), Softmax(dim=0, scale=0.09), Max(dim=2)
        self.k_mean, self.output_func = CMean(dim=1), topK()

    def create_cache(self, page_size: int, head_dim: int):
        return {"centroid": (1, head_dim)}

    def forward_cache(self, cache, loc, ctx):
        self.k_mean(cache["k"], cache["centroid"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        score = self.dot(q, cache["centroid"], ctx=ctx)
        self.softmax(score, ctx=ctx)
        self.output_func(self.over_heads(score, ctx=ctx), o, ctx=ctx)
'''

FILES = {
    "my_quest": File(QUEST, "gqa_quest_sparse_attention"),
    "my_running_average": File(RUNNING_AVERAGE, "running_avg_block_sparse_attention"),
    "my_gated_centroid": File(GATED_CENTROID, "venergy_gated_centroid"),
    "my_block_sparse": File(SOFTMAX_FOR_ITS_EFFECT, "gqa_block_sparse_attention", {"scale": 0.09}),
}

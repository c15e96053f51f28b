"""A user's flow with state: the centroid's score, averaged with that of the steps before."""

from flowlib import register, vFlow
from flowlib.ops import Add, CMean, Fill, GeMV, Load, Mean, Save, topK


@register("running_mean")
class RunningMean(vFlow):
    def __init__(self):
        self.centroid, self.reset = CMean(dim=1), Fill(0.0)
        self.mean, self.score, self.select = Mean(dim=1), GeMV(), topK()
        self.load, self.blend, self.save = Load(), Add(0.5, 1.0), Save()

    def create_cache(self, page_size, head_dim):
        return {"centroid": (1, head_dim), "running": (1, 1)}

    def forward_cache(self, cache, loc, ctx):
        self.centroid(cache["k"], cache["centroid"], loc=loc, ctx=ctx)
        self.reset(cache["running"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        score = self.score(self.mean(q, ctx=ctx), cache["centroid"], ctx=ctx)
        score = self.blend(self.load(cache["running"], ctx=ctx), score, ctx=ctx)
        self.save(score, cache["running"], ctx=ctx)
        self.select(score, o, ctx=ctx)

"""A cache beside the same tokens in plain tensors, and outputs held against plain loops over the selection."""

import math

import torch

import flowlib
from flowlib.testing.oracles.bisection import entmax_request
from tests.suites.entmax_world import attention_truth

SLOPES = [0.25, 0.0, 0.0625, 0.0]
BOTH = ("topk", "gaussian")


class Scene:
    """A cache, the same tokens in plain tensors, and a generator; rows of different lengths."""

    def __init__(self, lengths=(700, 437), heads=(4, 2), dim=32, dtype=torch.float32, seed=0, shared=0.0, **options):
        self.g = torch.Generator().manual_seed(seed)
        size, (self.heads, kv_heads) = max(lengths), heads
        k, v = (torch.randn(len(lengths), kv_heads, size, dim, generator=self.g).to(dtype) for _ in range(2))
        if shared:  # keys of a page are near each other
            drift = torch.randn(len(lengths), kv_heads, -(-size // 16), dim, generator=self.g)
            k = (0.2 * k.float() + shared * drift.repeat_interleave(16, 2)[:, :, :size]).to(dtype)
        for b, n in enumerate(lengths):
            k[b, :, n:], v[b, :, n:] = math.nan, math.nan  # past a row's length anything may stand
        self.cache = flowlib.PagedKVCache(**{"stats": BOTH, **options})
        self.cache.initialize(k, v, lengths)
        self.k = [k[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)]  # [length, H_kv, D]
        self.v = [v[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)]

    def token(self):
        shape = (len(self.k), self.k[0].shape[1], 1, self.k[0].shape[2])
        return [torch.randn(shape, generator=self.g).to(self.k[0].dtype) for _ in range(2)]

    def queries(self):
        q = torch.randn(len(self.k), self.heads, 1, self.k[0].shape[2], generator=self.g).to(self.k[0].dtype)
        return q, torch.full_like(q, math.nan)

    def remember(self, k, v):
        self.k = [torch.cat([old, new.transpose(0, 1)]) for old, new in zip(self.k, k, strict=True)]
        self.v = [torch.cat([old, new.transpose(0, 1)]) for old, new in zip(self.v, v, strict=True)]

    def append(self):
        k, v = self.token()
        self.cache.append(k, v)
        self.remember(k, v)


def kept(info, b, tokens, page_size=16):
    """The selection of a row as tokens, bool [H_q, tokens]; checks its form."""
    pages, counts = info.selection.pages[b], info.selection.counts[b]
    tail = (tokens - 1) // page_size
    for h in range(len(pages)):
        row, n = pages[h].tolist(), int(counts[h])
        assert row[:n] == sorted(set(row[:n]))
        assert row[n - 1] == tail
        assert row[n:] == [-1] * (len(row) - n)
        assert int(info.selection.sel_lens[b, h]) == (n - 1) * page_size + (tokens - 1) % page_size + 1
    return (torch.arange(tokens)[:, None] // page_size == pages[:, None, :]).any(-1)


def assert_rows(scene, q, out, alpha, info, slopes=SLOPES):
    """out is the oracle's over the selection, to within 1e-5 and to within what rounding may do."""
    for b in range(len(scene.k)):
        keep = kept(info, b, len(scene.k[b]))
        truth, tolerance = attention_truth(q[b, :, 0], scene.k[b], scene.v[b], alpha, slopes, keep)
        away = (out[b, :, 0].double() - truth).abs()
        allowed = tolerance + torch.finfo(out.dtype).eps * truth.abs()
        assert away.le(allowed).all(), (b, float(away.max()))
        if out.dtype is torch.float32:
            assert away.max() <= 1e-5


def pages_before_tail(scene, b):
    return (len(scene.k[b]) - 1) // 16


def relative(out, scene, q, alpha, slopes):
    truth = torch.stack(
        [entmax_request(q[b, :, 0], scene.k[b], scene.v[b], alpha, slopes)[0] for b in range(len(scene.k))]
    )
    return float((out[:, :, 0].double() - truth).norm() / truth.norm())

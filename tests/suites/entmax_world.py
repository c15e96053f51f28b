"""Requests over a paged pool, hostile wherever nothing may be read, for the functions of flowlib.entmax."""

import torch

from flowlib.entmax import page_bounds, page_moments, page_stats
from flowlib.testing import fill_nan, gamma
from flowlib.testing.oracles.bisection import entmax_request


class World:
    """Requests in a pool of shuffled pages; slots, pages and table entries that nobody owns are poison.

    Attributes:
        q: [B, H_q, D]. k, v: one [length, H_kv, D] of each request. kv: [2, num_blocks, page_size, H_kv, D].
    """

    def __init__(self, lengths, heads=(4, 2), dim=12, page_size=4, dtype=torch.float32, seed=0, order=None, width=None):
        g = torch.Generator().manual_seed(seed)
        self.lengths, self.page_size = lengths, page_size
        self.q = torch.randn(len(lengths), heads[0], dim, generator=g).to(dtype)
        self.k, self.v = ([torch.randn(n, heads[1], dim, generator=g).to(dtype) for n in lengths] for _ in range(2))
        counts = [-(-n // page_size) for n in lengths]
        blocks = sum(counts) + 3
        free = iter(torch.randperm(blocks, generator=torch.Generator().manual_seed(order or seed)).tolist())
        self.kv = torch.zeros(2, blocks, page_size, heads[1], dim, dtype=dtype)
        fill_nan(self.kv)
        self.table = torch.full((len(lengths), width or max(counts) + 1), 2**31 - 1, dtype=torch.int32)
        for b, count in enumerate(counts):
            for p in range(count):
                self.table[b, p] = block = next(free)
                for side, values in enumerate((self.k[b], self.v[b])):
                    tokens = values[p * page_size : (p + 1) * page_size]
                    self.kv[side, block, : len(tokens)] = tokens
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32)
        self.stats = page_stats(self.kv[0])

    def bounds(self, slopes=None):
        stats = (self.stats.k_min, self.stats.k_max)
        return page_bounds(self.q, *stats, self.seq_lens, self.page_size, self.table, slopes)

    def moments(self, slopes=None):
        stats = (self.stats.k_mean, self.stats.k_std)
        return page_moments(self.q, *stats, self.seq_lens, self.page_size, self.table, slopes)

    def scored(self, b):
        """Full pages before the tail."""
        return max(0, (self.lengths[b] - 1) // self.page_size)

    def kept(self, pages, b):
        """Page lists [H_q, W] of a request as its tokens, bool [H_q, length]."""
        page = torch.arange(self.lengths[b]) // self.page_size
        return (page[:, None] == pages[:, None, :]).any(-1)


def attention_truth(q, k, v, alpha, slopes=None, keep=None, compute=torch.float32):
    """o [H_q, D] of the oracle, and how far rounding in `compute` may move it [H_q, 1].

    Scores are off by at most ds = gamma · (Σ|q·k| / sqrt(D) + |bias|), and with u = p^(2 − alpha) the probabilities
    by 2 · Σu · ds in total: the Jacobian is diag(u) − u·uᵀ / Σu. The threshold is rounded, and the sum over V.
    """
    dim, alphas = q.shape[1], [alpha] * len(q) if isinstance(alpha, float | int) else list(alpha)
    o, p = entmax_request(q, k, v, alphas, slopes, keep)
    if len(k) == 0:
        return o, torch.zeros(len(q), 1, dtype=torch.float64)
    tolerance, group = torch.zeros(len(q), 1, dtype=torch.float64), len(q) // k.shape[1]
    for h in range(len(q)):
        sizes = (k[:, h // group].double().abs() @ q[h].double().abs()).max() / dim**0.5
        bias = 0.0 if slopes is None else abs(float(slopes[h])) * len(k)
        u = torch.where(p[h] > 0, p[h] ** (2.0 - alphas[h]), 0.0).sum()
        ds = gamma(dim + 16, compute) * (1.0 + sizes + bias)
        tolerance[h] = (2.0 * u * ds + gamma(64, compute)) * v[:, h // group].double().abs().max()
    return o, tolerance

"""What `soak.py` plugs into SGLang beside flowlib: an idle scheduler that is asked for it checks its memory.

The scheduler looks for the file ``asked`` in the folder named by ``SOAK_CHECK``, and answers in ``answer.json``: how
many pages the radix cache holds, in how many layers, how many of their summaries differ from a recomputation, and
where the tokens of the pool are.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

import flowlib

ASKED, ANSWER = "asked", "answer.json"


def register() -> None:
    """SGLang's entry point for plugins."""
    from sglang.srt.managers.scheduler import Scheduler

    original = Scheduler.on_idle

    def on_idle(self: Any) -> None:
        asked = Path(os.environ["SOAK_CHECK"]) / ASKED
        if self.is_fully_idle() and asked.exists():
            write(asked.with_name(ANSWER), look(self))
            asked.unlink()
        original(self)

    Scheduler.on_idle = on_idle  # type: ignore[method-assign]


def write(path: Path, answer: dict[str, Any]) -> None:
    """Writes the answer so that it is there whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(answer), encoding="utf-8")
    part.rename(path)


def look(scheduler: Any) -> dict[str, Any]:
    """Everything the soak wants to know of an idle scheduler."""
    tree, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
    pool, requests = allocator.get_kvcache(), scheduler.req_to_token_pool
    slots = tree.all_values_flatten() if tree.evictable_size() else torch.empty(0, dtype=torch.int64)
    pages = torch.unique(slots.to(pool.device, torch.int64) // pool.page_size)
    stores = [store for store in pool.flow_stores() if store.fields]
    return {
        "pages": len(pages),
        "layers": len(stores),
        "wrong": sum(wrong_pages(store, pages, pool.flow_setup.impl) for store in stores),
        "total": allocator.size,
        "available": allocator.available_size(),
        "cached": tree.evictable_size(),
        "locked": tree.protected_size(),
        "requests": requests.size - requests.available_size(),
    }


def wrong_pages(store: flowlib.KVStore, pages: torch.Tensor, impl: str) -> int:
    """How many of `pages` (int64 ``[n]``) have a summary that is not what their K and V give, to the bit."""
    if not len(pages):
        return 0
    blank = {name: torch.full_like(field, float("nan")) for name, field in store.fields.items()}
    fresh = flowlib.KVStore(store.plan, store.k, store.given.get("v"), blank, store.field_scales)
    size = store.plan.spec.page_size
    store.plan.update(fresh, pages * size + size - 1, impl=impl)
    differs = torch.zeros(len(pages), dtype=torch.bool, device=pages.device)
    for name, field in store.fields.items():
        kept, made = (f[pages].flatten(1).view(torch.uint8) for f in (field, fresh.fields[name]))
        differs |= (kept != made).any(1) | fresh.fields[name][pages].float().isnan().flatten(1).any(1)
    return int(differs.sum())

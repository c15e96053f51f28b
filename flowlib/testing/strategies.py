"""Hypothesis strategies for specs, ragged lengths and scenes; needs hypothesis (``pip install 'flowlib[test]'``)."""

from __future__ import annotations

import torch

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError("flowlib.testing.strategies needs the package hypothesis: pip install 'flowlib[test]'") from error

from flowlib.core.flow import vFlow
from flowlib.core.spec import Spec
from flowlib.runtime.api import profile
from flowlib.testing.inputs import Scene, scene

PAGE_SIZES = (1, 2, 3, 5, 8, 16, 17, 32, 64)
HEAD_DIMS = (8, 16, 24, 48, 64, 80, 96, 128, 192)
GROUP_SIZES = (1, 2, 3, 4, 5, 7, 8)


def dtypes() -> st.SearchStrategy[torch.dtype]:
    """dtypes of a pool without scales."""
    return st.sampled_from((torch.float32, torch.bfloat16, torch.float16))


def specs(
    page_sizes: tuple[int, ...] = PAGE_SIZES,
    head_dims: tuple[int, ...] = HEAD_DIMS,
    group_sizes: tuple[int, ...] = GROUP_SIZES,
    max_pages: int = 24,
) -> st.SearchStrategy[Spec]:
    """Specs with odd sizes, Dv != D, ALiBi, budgets by number and by ratio, and none to three reserved pages."""

    @st.composite
    def draw_spec(draw: st.DrawFn) -> Spec:
        group, heads = draw(st.sampled_from(group_sizes)), draw(st.integers(1, 3))
        slopes = st.lists(st.floats(0, 2, width=32), min_size=group * heads, max_size=group * heads).map(tuple)
        return Spec(
            page_size=draw(st.sampled_from(page_sizes)),
            head_dim=draw(st.sampled_from(head_dims)),
            v_head_dim=draw(st.none() | st.sampled_from(head_dims)),
            group_size=group,
            num_kv_heads=heads,
            kv_dtype=draw(dtypes()),
            scale=draw(st.none() | st.floats(0.01, 1.0)),
            top_k=draw(st.integers(0, 8)),
            top_k_ratio=draw(st.just(0.0) | st.floats(0, 1)),
            bos=draw(st.integers(0, 3)),
            eos=draw(st.integers(1, 3)),
            max_pages=max_pages,
            alibi_slopes=draw(st.none() | slopes),
        )

    return draw_spec()


def lengths(spec: Spec, max_requests: int = 4) -> st.SearchStrategy[list[int]]:
    """Lengths of 1 to `max_requests` requests: 0, page bounds and their neighbours, anything up to ``max_pages``."""
    longest = spec.max_pages * spec.page_size
    bounds = st.builds(
        lambda pages, off: min(max(pages * spec.page_size + off, 0), longest),
        st.integers(0, spec.max_pages),
        st.integers(-1, 1),
    )
    return st.lists(st.just(0) | bounds | st.integers(0, longest), min_size=1, max_size=max_requests)


def scenes(flow: vFlow, spec_strategy: st.SearchStrategy[Spec] | None = None) -> st.SearchStrategy[Scene]:
    """Scenes of a flow on the CPU."""

    @st.composite
    def draw_scene(draw: st.DrawFn) -> Scene:
        spec = draw(specs() if spec_strategy is None else spec_strategy)
        return scene(profile(flow, spec), draw(lengths(spec)), seed=draw(st.integers(0, 2**31 - 1)))

    return draw_scene()

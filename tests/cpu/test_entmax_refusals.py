"""What both decoders refuse, by its message, before anything is stored."""

import pytest
import torch

import flowlib
from flowlib.entmax import gaussian_decode, topk_decode
from flowlib.errors import BackendError, FormatError, OptionError, ShapeError
from tests.refusals import refused
from tests.suites.entmax_cache import BOTH, Scene


def decode_cases():
    """Changes of the arguments, the error and its message, for both decoders."""
    q, strided = torch.zeros(2, 4, 1, 32), torch.zeros(2, 4, 1, 64)[..., ::2]
    return [
        ({"q": q[:, :, 0]}, ShapeError, "q is [2, 4, 32], expected [B, H_q, 1, D]"),
        ({"q": q.expand(2, 4, 3, 32)}, ShapeError, "q is [2, 4, 3, 32], expected [2, H_q, 1, 32] as the cache has it"),
        ({"q": q[:1]}, ShapeError, "q is [1, 4, 1, 32], expected [2, H_q, 1, 32] as the cache has it"),
        ({"q": q[..., :16]}, ShapeError, "q is [2, 4, 1, 16], expected [2, H_q, 1, 32] as the cache has it"),
        ({"q": q[:, :3]}, ShapeError, "q has 3 heads, expected a multiple of the 2 kv heads"),
        ({"out": q[:, :2]}, ShapeError, "out is [2, 2, 1, 32], expected [2, 4, 1, 32] as q"),
        ({"out": q.half()}, FormatError, "out is torch.float16, expected torch.float32 as q"),
        ({"out": None}, FormatError, "out is NoneType, expected a floating tensor"),
        ({"out": strided}, ShapeError, "the last axis of out has stride 2, expected 1"),
        ({"q": strided}, ShapeError, "the last axis of q has stride 2, expected 1"),
        ({"alibi_slopes": torch.zeros(2)}, ShapeError, "alibi_slopes is [2], expected [4], one for each query head"),
        ({"min_context": -1}, OptionError, "min_context is -1, expected an integer of at least 0"),
        ({"alpha": 2.5}, OptionError, "alpha is 2.5, expected a number"),
        ({"impl": "cuda"}, OptionError, "impl is 'cuda', expected one of 'reference', 'triton'"),
        ({"cache": None}, FormatError, "cache is NoneType, expected a PagedKVCache"),
        ({"append_cache": True}, FormatError, "k_new or v_new is None, expected [B, H_kv, 1, D] where append_cache"),
    ]


@pytest.mark.parametrize("decode", [topk_decode, gaussian_decode])
def test_refusals_of_both_decoders(decode):
    scene = Scene()
    for changes, kind, message in decode_cases():
        arguments = {"q": torch.zeros(2, 4, 1, 32), "cache": scene.cache, "k_new": None, "v_new": None, **changes}
        arguments = {"out": torch.zeros(2, 4, 1, 32), "append_cache": False, **arguments}
        if decode is topk_decode:
            arguments["topk_pages"] = 5
        with refused(kind, f"{decode.__name__}: {message}"):
            decode(**arguments)
    k = torch.zeros(2, 3, 1, 32)
    arguments = {"q": torch.zeros(2, 4, 1, 32), "out": torch.zeros(2, 4, 1, 32), "k_new": k, "v_new": k}
    more = {"topk_pages": 5} if decode is topk_decode else {}
    with refused(ShapeError, "append: k_new is [2, 3, 1, 32], expected [2, 2, 1, 32] [B, H_kv, 1, D]"):
        decode(cache=scene.cache, append_cache=True, **arguments, **more)
    assert scene.cache.seq_lens_host == (700, 437), "nothing is stored"
    wanted = "topk" if decode is topk_decode else "gaussian"
    empty = flowlib.PagedKVCache(stats=BOTH)
    with refused(BackendError, "PagedKVCache: the cache is empty"):
        decode(cache=empty, append_cache=False, **arguments, **more)
    with refused(OptionError, f"{decode.__name__}: the cache keeps the statistics (), expected {wanted!r} among them"):
        decode(cache=flowlib.PagedKVCache(), append_cache=False, **arguments, **more)


def test_refusals_of_each_decoder():
    scene = Scene()
    q, out = scene.queries()

    def topk(topk_pages=5, **more):
        topk_decode(q, scene.cache, None, None, out, topk_pages, append_cache=False, **more)

    def gaussian(**more):
        gaussian_decode(q, scene.cache, None, None, out, **more)

    for pages in (1, 0, -2, 2.5):
        with refused(OptionError, f"topk_decode: topk_pages is {pages}, expected an integer of at least 2"):
            topk(pages)
    with refused(OptionError, "topk_decode: niter is 0, expected an integer of at least 1"):
        topk(niter=0)
    with refused(OptionError, "gaussian_decode: niter is -1, expected an integer of at least 0"):
        gaussian(niter=-1)
    with refused(OptionError, "gaussian_decode: alpha is 1.0, expected a number above 1 and at most 2"):
        gaussian(alpha=1.0)
    with refused(OptionError, "gaussian_decode: tau_mode is 'newton', expected one of 'exact', 'corrected', 'fixed'"):
        gaussian(tau_mode="newton")
    with refused(OptionError, "gaussian_decode: safety_margin_z is -0.5, expected a number of at least 0"):
        gaussian(safety_margin_z=-0.5)
    with refused(OptionError, "gaussian_decode: excess is -0.5, expected a number of at least 0"):
        gaussian(excess=-0.5)
    for quantile in (0.0, 1.0):
        with refused(OptionError, f"gaussian_decode: max_quantile is {quantile}, expected a number above 0 and below"):
            gaussian(max_quantile=quantile)

"""A spec with a number out of range is refused, naming the number and what would be right."""

import dataclasses

import pytest
import torch

import flowlib
from flowlib.errors import OptionError
from tests.refusals import refused

OUT_OF_RANGE = [
    ("page_size", 0, "an integer from 1 to 128"),
    ("page_size", 129, "an integer from 1 to 128"),
    ("page_size", 16.0, "an integer from 1 to 128"),
    ("page_size", True, "an integer from 1 to 128"),
    ("head_dim", 0, "an integer of at least 1"),
    ("v_head_dim", 0, "an integer of at least 1"),
    ("kv_lora_rank", 0, "an integer of at least 1"),
    ("group_size", 0, "an integer of at least 1"),
    ("num_kv_heads", -2, "an integer of at least 1"),
    ("max_pages", 0, "an integer from 1 to 1073741824"),
    ("max_pages", 2**30 + 1, "an integer from 1 to 1073741824"),
    ("max_batch", 0, "an integer of at least 1"),
    ("top_k", -1, "an integer from 0 to 1073741824"),
    ("top_k", 2**32, "an integer from 0 to 1073741824"),
    ("top_k", "8", "an integer from 0 to 1073741824"),
    ("top_k_ratio", 1.01, "a number from 0 to 1"),
    ("top_k_ratio", float("nan"), "a number from 0 to 1"),
    ("top_k_ratio", "0.1", "a number from 0 to 1"),
    ("top_k_ratio", True, "a number from 0 to 1"),
    ("bos", -1, "an integer from 0 to 1073741824"),
    ("bos", 2**30 + 1, "an integer from 0 to 1073741824"),
    ("eos", 0, "an integer from 1 to 1073741824 (the unfinished last page has no summary, so it can't be scored)"),
    ("eos", 2**31, "an integer from 1 to 1073741824 (the unfinished last page"),
    ("dense_below", -1, "an integer from 0 to 2147483647"),
    ("dense_below", 2**31, "an integer from 0 to 2147483647"),
    ("kv_dtype", torch.int8, "one of bfloat16, float16, float32, float8_e4m3fn"),
    ("scale", 0.0, "a positive finite number"),
    ("scale", "a", "a positive finite number"),
    ("scale", float("inf"), "a positive finite number"),
    ("k_scale", -1.0, "a positive finite number"),
    ("k_scale", None, "a positive finite number"),
    ("v_scale", float("nan"), "a positive finite number"),
    ("summary_dtype", torch.int8, "one of bfloat16, float16, float32, float8_e4m3fn"),
    ("summary_dtype", torch.float8_e5m2, "one of bfloat16, float16, float32, float8_e4m3fn"),
    ("summary_dtype", "float8_e4m3fn", "one of bfloat16, float16, float32, float8_e4m3fn"),
    ("summary_scale", 0.3, "a power of two from 2**-64 to 2**64"),
    ("summary_scale", -1.0, "a power of two from 2**-64 to 2**64"),
    ("summary_scale", 0.0, "a power of two from 2**-64 to 2**64"),
    ("summary_scale", 2.0**65, "a power of two from 2**-64 to 2**64"),
    ("summary_scale", float("inf"), "a power of two from 2**-64 to 2**64"),
    ("summary_scale", 2.0, "1.0 beside summary_dtype None: only float8_e4m3fn summaries are scaled"),
    ("alibi_slopes", 0.5, "8 finite numbers, one per query head"),
    ("alibi_slopes", ["a"] * 8, "8 finite numbers, one per query head"),
    ("alibi_slopes", [float("inf")] * 8, "8 finite numbers, one per query head"),
]


@pytest.mark.parametrize(("name", "value", "wanted"), OUT_OF_RANGE, ids=str)
def test_a_number_out_of_range(name, value, wanted):
    with refused(OptionError, f"Spec: {name} is {value!r}, expected {wanted}"):
        flowlib.Spec(**{name: value})


def test_every_number_of_the_spec_has_a_wrong_value_above():
    names = {field.name for field in dataclasses.fields(flowlib.Spec)}
    assert names == {name for name, _, _ in OUT_OF_RANGE}


def test_alibi_slopes_are_one_per_query_head():
    with refused(OptionError, "Spec: alibi_slopes has 4 values, expected 8, one per query head"):
        flowlib.Spec(group_size=4, num_kv_heads=2, alibi_slopes=[0.5] * 4)


def test_the_largest_page_counts_select_the_same_pages_in_both_modes():
    huge = {"top_k": 2**30, "bos": 2**30, "eos": 2**30, "dense_below": 2**31 - 1, "max_pages": 2**30}
    for changes in (*({name: value} for name, value in huge.items() if name != "max_pages"), huge):
        spec = flowlib.Spec(page_size=4, head_dim=8, group_size=1, num_kv_heads=1, **changes)
        plan = flowlib.profile(flowlib.build("quest"), spec.replace(max_pages=8))
        pool = flowlib.PagedPool(plan, num_pages=5)
        k = torch.randn(20, 1, 8)
        pool.write(k, k, torch.arange(20))
        batch = flowlib.Batch(torch.arange(5, dtype=torch.int32)[None], torch.tensor([18], dtype=torch.int32))
        q = torch.randn(1, 1, 8, dtype=torch.bfloat16)
        for impl in ("reference", "triton"):
            assert plan.step(q, pool, batch, impl=impl).pages[0, 0, :5].tolist() == list(range(5))


def test_a_changed_copy_is_checked_too():
    spec = flowlib.Spec(top_k=3)
    with refused(OptionError, "Spec: top_k is -3"):
        spec.replace(top_k=-3)
    assert spec.top_k == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.top_k = 4


@pytest.mark.parametrize(
    ("top_k", "ratio", "pages", "budget"),
    [(8, 0.0, 1000, 8), (8, 0.1, 50, 8), (8, 0.1, 1000, 100), (0, 1.0, 77, 77), (0, 0.5, 3, 1), (0, 1 / 3, 3, 0)],
)
def test_the_budget_is_an_integer_formula(top_k, ratio, pages, budget):
    spec = flowlib.Spec(top_k=top_k, top_k_ratio=ratio)
    assert spec.budget(pages) == max(top_k, (pages * round(ratio * 65536)) >> 16) == budget

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
    ("group_size", 0, "an integer of at least 1"),
    ("num_kv_heads", -2, "an integer of at least 1"),
    ("max_pages", 0, "an integer of at least 1"),
    ("max_batch", 0, "an integer of at least 1"),
    ("top_k", -1, "an integer of at least 0"),
    ("top_k", "8", "an integer of at least 0"),
    ("top_k_ratio", 1.01, "a number from 0 to 1"),
    ("top_k_ratio", float("nan"), "a number from 0 to 1"),
    ("bos", -1, "an integer of at least 0"),
    ("eos", 0, "an integer of at least 1 (the unfinished last page has no summary, so it can't be scored)"),
    ("dense_below", -1, "an integer of at least 0"),
    ("kv_dtype", torch.int8, "one of bfloat16, float16, float32, float8_e4m3fn"),
    ("scale", 0.0, "a positive number"),
    ("k_scale", -1.0, "a positive number"),
    ("v_scale", float("nan"), "a positive number"),
]


@pytest.mark.parametrize(("name", "value", "wanted"), OUT_OF_RANGE, ids=str)
def test_a_number_out_of_range(name, value, wanted):
    with refused(OptionError, f"Spec: {name} is {value!r}, expected {wanted}"):
        flowlib.Spec(**{name: value})


def test_every_number_of_the_spec_has_a_wrong_value_above():
    names = {field.name for field in dataclasses.fields(flowlib.Spec)}
    assert names - {name for name, _, _ in OUT_OF_RANGE} == {"alibi_slopes"}


def test_alibi_slopes_are_one_per_query_head():
    with refused(OptionError, "Spec: alibi_slopes has 4 values, expected 8, one per query head"):
        flowlib.Spec(group_size=4, num_kv_heads=2, alibi_slopes=[0.5] * 4)


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

"""The suite's own trap works: fresh memory is poisoned in every way torch gives it out."""

import pytest
import torch

MAKERS = {
    "empty": lambda dtype: torch.empty(3, dtype=dtype),
    "empty_like": lambda dtype: torch.empty_like(torch.zeros(3, dtype=dtype)),
    "new_empty": lambda dtype: torch.zeros(1, dtype=dtype).new_empty(3),
    "empty_strided": lambda dtype: torch.empty_strided((3,), (2,), dtype=dtype),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("maker", MAKERS)
def test_fresh_floats_are_nan(maker, dtype):
    assert MAKERS[maker](dtype).float().isnan().all()


@pytest.mark.parametrize("maker", MAKERS)
def test_fresh_integers_are_out_of_every_range(maker):
    assert (MAKERS[maker](torch.int32) == torch.iinfo(torch.int32).max).all()

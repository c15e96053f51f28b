"""The suite of attention over MLA latents, interpreted; see tests/suites/attend_mla.py."""

import pytest

from flowlib.kernels import attend_mla
from flowlib.runtime import interpreter
from tests.suites.attend_mla import (  # noqa: F401
    test_latents_beyond_two_to_the_31_elements,
    test_latents_listed_and_no_others_are_attended,
    test_splits_of_latents_do_not_change_the_answer,
    test_strides_of_queries_and_latents_are_free,
)

interpreter.install()


@pytest.mark.parametrize(
    ("pages", "page", "lists", "heads", "itemsize", "want"),
    [(130, 16, 1, 16, 2, 17), (130, 16, 8, 128, 2, 6), (130, 16, 16, 128, 2, 4), (130, 16, 64, 16, 2, 4),
     (130, 16, 70, 128, 2, 1), (130, 16, 512, 16, 2, 1), (3, 16, 8, 16, 2, 1), (0, 16, 0, 16, 4, 1)],
)  # fmt: skip
def test_split_heuristic(pages, page, lists, heads, itemsize, want):
    got = attend_mla.num_splits(pages, page, lists, heads, itemsize)
    assert got == want


@pytest.mark.parametrize(
    ("heads", "itemsize", "tile"), [(1, 2, 16), (16, 2, 16), (17, 2, 32), (128, 2, 64), (128, 1, 32), (128, 4, 16)]
)
def test_a_tile_holds_as_many_heads_as_fit(heads, itemsize, tile):
    assert attend_mla.head_tile(heads, itemsize) == tile

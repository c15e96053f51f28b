"""The suite of entmax attention over page lists, interpreted; see tests/suites/entmax_kernels.py."""

import mmap
from dataclasses import replace

import torch

from flowlib.kernels import entmax
from tests.suites.entmax_kernels import (
    test_a_fixed_threshold_is_taken_as_it_is,  # noqa: F401
    test_a_page_of_nan_shows,  # noqa: F401
    test_an_estimate_is_corrected,  # noqa: F401
    test_an_estimate_is_corrected_beyond_registers,  # noqa: F401
    test_as_many_tokens_as_a_list_holds_are_weighed_where_they_are_found,  # noqa: F401
    test_attends_to_exactly_the_listed_tokens,  # noqa: F401
    test_certificates,  # noqa: F401
    test_each_head_has_its_own_alpha,  # noqa: F401
    test_one_step_beyond_registers_leaves_tiles_out,  # noqa: F401
    test_rows_that_are_hard_to_solve,  # noqa: F401
    test_splits_do_not_change_the_threshold,  # noqa: F401
    test_strides_of_queries_and_pool_are_free,  # noqa: F401
    test_tiles_without_a_list_are_looked_through_where_the_threshold_is_low,  # noqa: F401
    test_values_are_read_where_there_is_mass_only,  # noqa: F401
    test_whole_rows,  # noqa: F401
)
from tests.suites.entmax_problem import Case, check, make, run


def test_slots_beyond_two_to_the_31_elements():
    case = Case(heads=1, group=2, dtype=torch.bfloat16, width=3)
    problem = make(case)
    stride, far = 1 << 22, 608  # the far slots' offset is 2.5e9 elements; untouched memory costs nothing
    pool = torch.frombuffer(mmap.mmap(-1, (far + 256) * stride * 2), dtype=torch.bfloat16)
    k, v = (pool.as_strided((far + problem.k.shape[0], 1, 64), (stride, 64, 1), start) for start in (0, 64))
    k[far:], v[far:] = problem.k, problem.v
    moved = replace(problem, k=k, v=v, table=problem.table + far // case.page)
    check(moved, run(moved, "cpu"))


def test_scratch_of_a_row():
    assert entmax.capacity(130, 16) == 2176
    small, large = entmax.workspace(6, 130, 16), entmax.workspace(6, 65536, 1)
    assert small == {
        "z": ((6, 2176), "float32"), "tile_max": ((6, 136), "float32"), "state": ((6, 8), "float32"),
        "support": ((6, 256), "int32"), "weights": ((6, 256), "float32"),
    }  # fmt: skip
    assert large["active"] == ((6, 4096), "int32")

"""Wrong use of latent prefill is refused by name, before anything runs."""

import pytest
import torch

from flowlib import mla
from flowlib.errors import BackendError, BatchError, FormatError, OptionError, ShapeError
from tests.processes import python
from tests.refusals import refused

BF16 = torch.bfloat16


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, 8, 16), "max_model_len is 0, expected an int of at least 1"), ((64, -1, 16), "max_num_seqs is -1"),
        ((64, 8, 1.5), "page_size is 1.5"), ((64, 8, True), "page_size is True"),
    ],
)  # fmt: skip
def test_workspace_rows(arguments, said):
    with refused(OptionError, "workspace_rows: ", said):
        mla.workspace_rows(*arguments)


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        (OptionError, {"schedule": "best"}, ("schedule is 'best', expected 'packed' or 'even'",)),
        (OptionError, {"workspace_rows": 0}, ("workspace_rows is 0",)),
        (OptionError, {"page_size": None}, ("page_size is None",)),
        (BatchError, {"context_lens": [4, -1]}, ("context_lens has -1, expected from 0 to 2147483647",)),
        (FormatError, {"context_lens": [4, 1.0]}, ("context_lens has 1.0, expected ints",)),
        (FormatError, {"context_lens": torch.ones(2)}, ("context_lens is torch.float32 [2]", "of rank 1")),
        (FormatError, {"context_lens": torch.ones(2, 1, dtype=torch.int32)}, ("context_lens is torch.int32 [2, 1]",)),
        (BatchError, {"context_lens": [2**31 - 1, 1]}, ("add up to 2147483648 tokens",)),
        (BatchError, {"context_lens": [1]}, ("query_start_loc has 3 offsets, expected 2, one more than the 1",)),
        (BatchError, {"query_start_loc": [1, 2, 3]}, ("query_start_loc begins with [1]", "begin with 0")),
        (BatchError, {"query_start_loc": []}, ("query_start_loc begins with []",)),
        (BatchError, {"query_start_loc": [0, 5, 3]}, ("query_start_loc falls from 5 to 3 after request 1",)),
    ],
)
def test_build_chunked_context(kind, change, said):
    given = {"context_lens": [4, 1], "query_start_loc": [0, 1, 2], "workspace_rows": 64, "page_size": 16}
    with refused(kind, "build_chunked_context: ", *said):
        mla.build_chunked_context(**given | change)


def gather(**change):
    given = {
        "cache": torch.zeros(4, 16, 576, dtype=BF16), "block_table": int32([0, 1], [2, 3]),
        "cu_seq_lens": int32(0, 20, 30), "token_to_seq": int32(*[0] * 20, *[1] * 10), "num_tokens": 30,
        "out": torch.zeros(30, 576, dtype=BF16), "seq_starts": int32(0, 0),
    }  # fmt: skip
    return mla.gather_latent(**given | change)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        (ShapeError, {"cache": torch.zeros(4, 576, dtype=BF16)}, ("cache is [4, 576], expected [pages, page, D]",)),
        (FormatError, {"cache": torch.zeros(4, 16, 656, dtype=torch.uint8)}, ("cache is torch.uint8, whose rows",)),
        (FormatError, {"cache": torch.zeros(4, 16, 656).to(torch.float8_e4m3fn)}, ("float8_e4m3fn, whose rows need",)),
        (FormatError, {"out": torch.zeros(30, 576)}, ("out is torch.float32, expected torch.bfloat16",)),
        (ShapeError, {"out": torch.zeros(30, 512, dtype=BF16)}, ("out is [30, 512], expected [rows, 576]",)),
        (BatchError, {"out": torch.zeros(1, 576, dtype=BF16).expand(30, -1)}, ("strides [0, 1]", "pass a clone")),
        (OptionError, {"num_tokens": 31}, ("num_tokens is 31, expected from 0 to 30: out has 30 rows",)),
        (OptionError, {"num_tokens": -1}, ("num_tokens is -1",)),
        (FormatError, {"block_table": torch.zeros(2, 2, dtype=torch.int64)}, ("block_table is torch.int64",)),
        (BatchError, {"block_table": torch.zeros(2, 2, dtype=torch.int32).t()}, ("block_table has stride 2",)),
        (ShapeError, {"cu_seq_lens": int32(0, 30)}, ("cu_seq_lens is [2], expected [3]",)),
        (ShapeError, {"seq_starts": int32(0)}, ("seq_starts is [1], expected [2]",)),
        (FormatError, {"token_to_seq": [0] * 30}, ("token_to_seq is list, expected a tensor [rows]",)),
        (BatchError, {"token_to_seq": int32(*[2] * 30)}, ("token_to_seq names request 2, expected from 0 to 1",)),
        (BatchError, {"seq_starts": int32(13, 0)}, ("row 19 is in logical page 2 of request 0", "has 2 columns")),
        (BatchError, {"block_table": int32([0, 1], [2, 4])[:, [1, 0]].contiguous()}, ("page 4, expected from 0 to 3",)),
        (BatchError, {"block_table": int32([0, -1], [2, 3])}, ("block_table has page -1",)),
    ],
)  # fmt: skip
def test_gather_latent(impl, kind, change, said):
    with refused(kind, "gather_latent: ", *said):
        gather(**change, impl=impl)


def merge(**change):
    x, lse = torch.zeros(6, 4, 8, dtype=BF16), torch.zeros(6, 4)
    given = {"prefix_output": x, "prefix_lse": lse, "suffix_output": x.clone(), "suffix_lse": lse.clone()}
    return mla.merge_attn_states(**given | change)


BUFFER = torch.zeros(6, 4, 16, dtype=BF16)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        (ShapeError, {"prefix_output": torch.zeros(6, 4, 9, dtype=BF16)}, ("prefix_output is [6, 4, 9], expected",)),
        (FormatError, {"suffix_output": torch.zeros(6, 4, 8, dtype=torch.int32)}, ("suffix_output is torch.int32",)),
        (FormatError, {"prefix_lse": torch.zeros(6, 4, dtype=BF16)}, ("prefix_lse is torch.bfloat16, expected",)),
        (FormatError, {"suffix_lse": torch.zeros(4, 6)}, ("suffix_lse is [4, 6], expected [6, 4]", "suffix_lse.t()")),
        (ShapeError, {"prefix_lse": torch.zeros(6, 5)}, ("prefix_lse is [6, 5], expected [6, 4] [T H]",)),
        (FormatError, {"out_lse": torch.zeros(4, 6)}, ("out_lse is [4, 6]", "pass out_lse.t()")),
        (ShapeError, {"out": torch.zeros(6, 4, 7)}, ("out is [6, 4, 7]",)),
        (BatchError, {"out": torch.zeros(1, 4, 8).expand(6, -1, -1)}, ("out has strides [0, 8, 1]",)),
        (BatchError, {"prefix_output": BUFFER[..., :8], "out": BUFFER[..., 4:12]}, ("out lies among the memory of",)),
        (OptionError, {"prefill_tokens_with_context": 7}, ("prefill_tokens_with_context is 7, expected from 0 to 6",)),
        (OptionError, {"prefill_tokens_with_context": 1.0}, ("prefill_tokens_with_context is 1.0",)),
        (OptionError, {"output_scale": 0.0}, ("output_scale is 0.0, expected a number above 0",)),
    ],
)  # fmt: skip
def test_merge_attn_states(impl, kind, change, said):
    with refused(kind, "merge_attn_states: ", *said):
        merge(**change, impl=impl)


def test_float64_is_for_the_reference():
    x, lse = torch.zeros(2, 1, 8, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)
    with refused(FormatError, "merge_attn_states: float64 outputs are for impl='reference'"):
        mla.merge_attn_states(x, lse, x, lse, impl="triton")
    batch = mla.RaggedBatch.of([0, 2], [0, 2])
    with refused(FormatError, "varlen_attention: float64 inputs are for attention='reference'"):
        mla.varlen_attention(x, x, x, batch, scale=1.0, causal=True, attention="triton")
    with refused(FormatError, "chunked_prefill: float64 inputs are for impl='reference'"):
        prefill(q=torch.zeros(6, 2, 192).double(), k=torch.zeros(6, 2, 192).double(), v=torch.zeros(6, 2, 128).double(),
                impl="triton")  # fmt: skip


def attend(**change):
    given = {
        "q": torch.zeros(3, 2, 192), "k": torch.zeros(5, 2, 192), "v": torch.zeros(5, 2, 128),
        "batch": mla.RaggedBatch.of([0, 3], [0, 5]), "scale": 0.1, "causal": True,
    }  # fmt: skip
    return mla.varlen_attention(**given | change)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        (FormatError, {"batch": None}, ("batch is NoneType, expected a flowlib.mla.RaggedBatch",)),
        (ShapeError, {"q": torch.zeros(4, 2, 192)}, ("q is [4, 2, 192], expected [3, H, D]",)),
        (ShapeError, {"k": torch.zeros(5, 2, 128)}, ("k is [5, 2, 128], expected [5, 2, 192]",)),
        (ShapeError, {"k": torch.zeros(5, 1, 192)}, ("k is [5, 1, 192], expected [5, 2, 192]",)),
        (FormatError, {"v": torch.zeros(5, 2, 128, dtype=BF16)}, ("v is torch.bfloat16, expected torch.float32",)),
        (FormatError, {"scale": None}, ("scale is NoneType, expected a number",)),
        (ShapeError, {"out": torch.zeros(3, 2, 192)}, ("out is [3, 2, 192], expected [3, 2, 128]",)),
        (FormatError, {"lse": torch.zeros(3, 2, dtype=BF16)}, ("lse is torch.bfloat16",)),
        (BatchError, {"lse": torch.zeros(1, 2).expand(3, -1)}, ("lse has strides [0, 1]",)),
        (FormatError, {"q": torch.zeros(3, 0, 192), "k": torch.zeros(5, 0, 192), "v": torch.zeros(5, 0, 128)},
         ("q is [3, 0, 192], v [5, 0, 128], expected at least one head and lane",)),
    ],
)  # fmt: skip
def test_varlen_attention(impl, kind, change, said):
    with refused(kind, "varlen_attention: ", *said):
        attend(**change, attention=impl)


def test_ragged_batch():
    with refused(BatchError, "RaggedBatch: kv_start_loc has 2 offsets, expected 3 as query_start_loc"):
        mla.RaggedBatch.of([0, 1, 2], [0, 1])
    with refused(BatchError, "RaggedBatch: query_start_loc falls from 4 to 1 after request 1"):
        mla.RaggedBatch.of([0, 4, 1], [0, 1, 2])


def prefill(**change):
    given = {
        "q": torch.zeros(6, 2, 192, dtype=BF16), "k": torch.zeros(6, 2, 192, dtype=BF16),
        "v": torch.zeros(6, 2, 128, dtype=BF16), "cache": torch.zeros(4, 16, 576, dtype=BF16),
        "block_table": int32([0, 1], [2, 3]), "context": mla.build_chunked_context([20, 4], [0, 3, 6], 32, 16),
        "up_project": lambda x: (x.new_zeros(len(x), 2, 192), x.new_zeros(len(x), 2, 128)), "scale": 0.1,
    }  # fmt: skip
    return mla.chunked_prefill(**given | change)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        (FormatError, {"context": None}, ("context is NoneType, expected one of build_chunked_context(...)",)),
        (FormatError, {"up_project": None}, ("up_project is NoneType, expected a function of latent rows",)),
        (ShapeError, {"q": torch.zeros(7, 2, 192, dtype=BF16)}, ("q has 7 rows, expected 6, the end of query_s",)),
        (ShapeError, {"v": torch.zeros(5, 2, 128, dtype=BF16)}, ("v is [5, 2, 128]",)),
        (FormatError, {"cache": torch.zeros(4, 16, 656, dtype=torch.uint8)}, ("cache is torch.uint8",)),
        (ShapeError, {"cache": torch.zeros(4, 32, 576, dtype=BF16)}, ("pages of 32 tokens", "pages of 16")),
        (ShapeError, {"block_table": int32([0, 1])}, ("block_table is [1, 2], expected [2, W]",)),
        (BatchError, {"block_table": int32([0], [2])}, ("block_table has 1 columns, request 0 has 20 context tokens",)),
        (ShapeError, {"workspace": torch.zeros(23, 576, dtype=BF16)}, ("workspace has 23 rows, the largest chunk",)),
        (FormatError, {"workspace": torch.zeros(32, 576)}, ("workspace is torch.float32",)),
        (ShapeError, {"out": torch.zeros(6, 2, 192, dtype=BF16)}, ("out is [6, 2, 192]",)),
        (FormatError, {"out": torch.zeros(6, 2, 128)}, ("out is torch.float32, expected torch.bfloat16",)),
        (FormatError, {"up_project": lambda x: x}, ("up_project's result is Tensor, expected a pair (k, v)",)),
        (ShapeError, {"up_project": lambda x: (x.new_zeros(32, 2, 192), x.new_zeros(32, 2, 128))},
         ("up_project's result: k is [32, 2, 192], expected [24, 2, 192]",)),
        (FormatError, {"up_project": lambda x: (torch.zeros(len(x), 2, 192), x)}, ("k is torch.float32",)),
    ],
)  # fmt: skip
def test_chunked_prefill(impl, kind, change, said):
    with refused(kind, "chunked_prefill: ", *said):
        prefill(**change, impl=impl)


def test_names_of_implementations():
    for call, what in ((prefill, "chunked_prefill"), (merge, "merge_attn_states"), (gather, "gather_latent")):
        with refused(OptionError, f"{what}: impl is 'cuda', expected 'reference' or 'triton'"):
            call(impl="cuda")
    with refused(OptionError, "attention is 'flash', expected one of"):
        prefill(attention="flash")
    with refused(BackendError, "attention='flashinfer' needs"):
        prefill(attention="flashinfer", impl="triton")


def test_tensors_of_two_devices():
    with refused(BatchError, "prefix_lse is on meta, expected cpu as the others"):
        merge(prefix_lse=torch.zeros(6, 4, device="meta"))
    with refused(BatchError, "cache is on meta, expected cpu as q"):
        prefill(cache=torch.zeros(4, 16, 576, dtype=BF16, device="meta"))
    with refused(BackendError, "merge_attn_states: impl='triton' on meta tensors"):
        x, lse = torch.zeros(6, 4, 8, device="meta"), torch.zeros(6, 4, device="meta")
        mla.merge_attn_states(x, lse, x.clone(), lse.clone(), impl="triton")


def test_up_projection():
    weight = torch.zeros(512, 2 * 256)
    with refused(ShapeError, "weight has 512 columns, expected num_heads=3 times (nope + v_head_dim=128)"):
        mla.up_projection(weight, 3)
    with refused(ShapeError, "weight has 512 columns, expected num_heads=4"):
        mla.up_projection(weight, 4)
    with refused(ShapeError, "weight is [512], expected"):
        mla.up_projection(weight[:, 0], 2)
    with refused(OptionError, "num_heads is 0"):
        mla.up_projection(weight, 0)
    with refused(OptionError, "latent rows have 64 values, the weight needs 512 and rope"):
        mla.up_projection(weight, 2)(torch.zeros(3, 64))


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch, flowlib, flowlib.errors
mla = flowlib.mla
assert not {"flashinfer", "triton.language"} & set(sys.modules)
context = mla.build_chunked_context([20, 0], [0, 3, 5], 16, 8)
q, v = torch.randn(5, 2, 24), torch.randn(5, 2, 16)
cache, table = torch.randn(4, 8, 40), torch.tensor([[0, 1, 2], [3, 3, 3]], dtype=torch.int32)
up = mla.up_projection(torch.randn(32, 64), 2, 16)
out = mla.chunked_prefill(q, q, v, cache, table, context, up, scale=0.1)
assert out.o.isfinite().all() and out.attention == "reference"
try:
    mla.chunked_prefill(q, q, v, cache, table, context, up, scale=0.1, impl="triton")
except flowlib.errors.BackendError as error:
    print(error)
"""


def test_the_reference_needs_no_triton():
    said = python("-c", WITHOUT_TRITON, TRITON_INTERPRET="1")
    assert "needs the package triton, which cannot be imported" in said


def test_kernels_on_cpu_tensors_need_the_interpreter():
    code = WITHOUT_TRITON.replace('sys.modules["triton"] = None', "")
    assert "needs TRITON_INTERPRET=1 set before Triton is imported" in python("-c", code, TRITON_INTERPRET="0")

"""Keys and values of latent rows are written where they stay, whatever the layouts, blocks and dtypes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flowlib import mla
from flowlib.mla import projection
from flowlib.testing import tolerance
from tests.suites.mla_loop import cases

RANK, HEADS, NOPE, DV, ROPE = 48, 3, 20, 12, 8
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def inputs(tokens, dtype=BF16, weight_dtype=BF16, rope=ROPE):
    """Latent rows, apart in memory as in a workspace of wider rows, and the weight of a checkpoint, transposed."""
    latent = cases.lcg(1, tokens, RANK + rope + 8).to(dtype)[:, : RANK + rope]
    return latent, cases.lcg(2, HEADS * (NOPE + DV), RANK).to(weight_dtype).t()


def check(latent, weight):
    """Products within the derived tolerance, rope to the bit, both contiguous."""
    k, v = mla.up_projection(weight, HEADS, DV)(latent)
    content = latent[:, :RANK].to(weight.dtype)
    shape = len(latent), HEADS, NOPE + DV
    truth, size = (
        (content.double().abs() if absolute else content.double())
        @ (weight.double().abs() if absolute else weight.double())
        for absolute in (False, True)
    )
    compute = F64 if weight.dtype is F64 else F32
    summed = (tolerance.gamma(RANK, compute) * size).view(shape)
    rounded = sum(tolerance.rounding_step(truth.view(shape), x) for x in (weight.dtype, latent.dtype))
    allowed = 2 * (summed + rounded)
    for got, part in ((k[..., :NOPE], slice(NOPE)), (v, slice(NOPE, None))):
        assert tolerance.judge(got, truth.view(shape)[..., part], allowed[..., part]).ok
    wanted = latent[:, None, RANK:].expand(-1, HEADS, -1)
    assert torch.equal(k[..., NOPE:].nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert k.is_contiguous()
    assert v.is_contiguous()
    assert {k.dtype, v.dtype} == {latent.dtype}
    assert (k.shape, v.shape) == ((len(latent), HEADS, NOPE + latent.shape[1] - RANK), (len(latent), HEADS, DV))


@pytest.mark.parametrize("tokens", [0, 1, 5, 6, 23])
@pytest.mark.parametrize("weight_dtype", [BF16, F32, F64])
@pytest.mark.parametrize("dtype", [BF16, F32, F64])
def test_blocks_and_dtypes(dtype, weight_dtype, tokens, monkeypatch):
    monkeypatch.setattr(projection, "_BLOCK_BYTES", 5 * RANK * weight_dtype.itemsize)
    check(*inputs(tokens, dtype, weight_dtype))


@pytest.mark.parametrize("rope", [0, 3, 8])
def test_layouts(rope):
    latent, weight = inputs(7, rope=rope)
    odd = torch.empty(latent.numel() + 1, dtype=BF16)[1:].view(latent.shape).copy_(latent)
    columns = latent.t().contiguous().t()
    for rows in (latent, latent.contiguous(), odd, columns, latent[:1].expand(4, -1), latent[::2]):
        for given in (weight, weight.contiguous(), weight.repeat(1, 2)[:, : weight.shape[1]]):
            check(rows, given)


def test_a_weight_that_could_be_trained():
    latent, weight = inputs(5)
    wanted = mla.up_projection(weight, HEADS, DV)(latent)
    for got, x in zip(mla.up_projection(torch.nn.Parameter(weight), HEADS, DV)(latent), wanted, strict=True):
        assert torch.equal(got, x)
        assert not got.requires_grad
    weight.mul_(2)  # in place, as weights are updated
    check(latent, weight)


def test_a_rope_part_that_is_no_number_stays_in_its_part():
    latent, weight = inputs(5)
    latent[3, RANK:] = torch.nan
    check(latent, weight)


class Watched(TorchDispatchMode):
    """Keeps each call and its tensors."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


@pytest.mark.parametrize("transposed", [True, False])
def test_nothing_is_allocated_but_keys_and_values(transposed, monkeypatch):
    """And products have layouts that torch hands to cuBLAS as they are: unit last stride, rows apart by no less."""
    latent, weight = inputs(13)
    monkeypatch.setattr(projection, "_BLOCK_BYTES", 5 * RANK * 2)
    project = mla.up_projection(weight if transposed else weight.contiguous(), HEADS, DV)
    with Watched() as watched:
        k, v = project(latent)
    names = [str(func) for func, *_ in watched.calls if not func.is_view]
    names = [x for x in names if x != "aten.fill_.Scalar"]  # the NaN that tests find in empty tensors
    assert sorted(names) == ["aten.bmm.out"] * 6 + ["aten.copy_.default"] + ["aten.new_empty.default"] * 2
    made = [x for func, _, _, x in watched.calls if str(func) == "aten.new_empty.default"]
    assert [x.data_ptr() for x in made] == [k.data_ptr(), v.data_ptr()]
    for func, args, options, _ in watched.calls:
        if str(func) == "aten.bmm.out":
            (rows, of_heads), out = args, options["out"]
            assert rows.stride(0) == 0
            for x in (rows, out, of_heads if not transposed else of_heads.transpose(1, 2)):
                assert x.stride(2) == 1
                assert x.stride(1) >= x.shape[2]
        if str(func) == "aten.copy_.default":
            assert {x.dtype for x in args[:2]} == {torch.int64}

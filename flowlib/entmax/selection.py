"""Which pages a query head attends to, and when nothing is lost by it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flowlib.core.errors import BatchError, OptionError, ShapeError
from flowlib.entmax import checks
from flowlib.entmax.checks import Alpha
from flowlib.entmax.pages import scorable, tail_of


class Selection(NamedTuple):
    """Pages of each query head.

    Attributes:
        pages: int32 ``[B, H_q, W]``, logical pages in ascending order, the row's tail last, then -1.
        counts: int32 ``[B, H_q]``, pages selected; 0 for an empty row.
        sel_lens: int32 ``[B, H_q]``, tokens selected.
    """

    pages: torch.Tensor
    counts: torch.Tensor
    sel_lens: torch.Tensor


def topk_select(bounds: torch.Tensor, seq_lens: torch.Tensor, topk_pages: int, page_size: int) -> Selection:
    """The tail and the `topk_pages` - 1 pages before it with the highest bounds; all of them where there are fewer.

    Deterministic: ties go to the lower page; bounds of -inf and NaN are never selected.

    Args:
        bounds: ``[B, H_q, P]`` of any floating dtype, see :func:`page_bounds`; what stands from the tail on is not
            looked at.
        seq_lens: int32 ``[B]``.
        topk_pages: pages attended, the tail among them; at least 2.
        page_size: tokens of a page, a power of two.

    Returns:
        a selection of width `topk_pages`.

    Raises:
        OptionError: an option is out of range, or no row has `topk_pages` - 1 pages (lengths are looked at on the CPU
            only). FormatError, ShapeError, BatchError: a tensor does not fit.

    Source: EntmaxKV (arXiv:2605.21649), top-k selection; there the order of ties is the library's.
    """
    checks.floating("topk_select", "bounds", bounds, "B, H_q, P")
    topk_pages = checks.count("topk_select", "topk_pages", topk_pages, 2)
    page_size = checks.power_of_two("topk_select", "page_size", page_size)
    width = bounds.shape[2]
    checks.lengths("topk_select", seq_lens, bounds.shape[0], width * page_size)
    live = width
    if seq_lens.device.type == "cpu" and seq_lens.numel():
        live = -(-int(seq_lens.max()) // page_size)
    if live < topk_pages - 1:
        raise OptionError(
            f"topk_select: topk_pages is {topk_pages}, and no row has more than {live} pages: decode exactly, "
            f"without a selection, or choose at most {live + 1}"
        )
    scored = scorable(seq_lens, page_size, width)[:, None]
    eligible = scored & (bounds > float("-inf"))
    ranked = torch.sort(bounds.masked_fill(~eligible, float("-inf")), stable=True, dim=-1, descending=True).indices
    best = torch.zeros_like(eligible).scatter(-1, ranked[..., : topk_pages - 1], True)
    return pack(best & eligible, seq_lens, page_size, topk_pages)


def pack(keep: torch.Tensor, seq_lens: torch.Tensor, page_size: int, width: int) -> Selection:
    """The selection of the pages kept, bool ``[B, H_q, P]``, and each row's tail; `width` columns hold them all."""
    tail = tail_of(seq_lens, page_size)
    logical = torch.arange(keep.shape[2], device=keep.device)
    chosen = (keep & (logical < tail[:, None, None])) | (logical == tail[:, None, None])
    absent = keep.shape[2]
    pages = torch.where(chosen, logical, absent).sort(-1).values[..., :width]
    pages = torch.nn.functional.pad(pages, (0, width - pages.shape[2]), value=absent)
    counts = chosen.sum(-1)
    in_tail = seq_lens.to(torch.int64) - tail * page_size
    sel_lens = torch.where(counts > 0, (counts - 1) * page_size + in_tail[:, None], 0)
    as_int32 = [x.to(torch.int32) for x in (pages.masked_fill(pages == absent, -1), counts, sel_lens)]
    return Selection(*as_int32)


def certified_skip(bounds: torch.Tensor, known: torch.Tensor, alpha: Alpha) -> torch.Tensor:
    """Pages that cannot hold support, because one exactly known score is high enough: bool ``[B, H_q, P]``.

    tau is at least a · max s − 1, and a maximum over some of the scores is no larger: a page with
    a · bound <= a · known − 1 has no token above tau. Leaving it out changes nothing. At alpha 1 there is no such page.

    Args:
        bounds: ``[B, H_q, P]``, see :func:`page_bounds`; -inf is skipped wherever a score is known.
        known: ``[B, H_q]``, the largest exactly known score (of the tail, say); -inf where none is.
        alpha: from 1 to 2; a number or a tensor ``[H_q]``.

    Raises:
        OptionError, FormatError, ShapeError: an argument is out of range or does not fit.
    """
    checks.floating("certified_skip", "bounds", bounds, "B, H_q, P")
    checks.floating("certified_skip", "known", known)
    checks.same_shape("certified_skip", "known", known, bounds.shape[:2], "as bounds without pages")
    dtype = checks.computed_in(bounds, known)
    a = checks.alphas("certified_skip", alpha, bounds.shape[1:2], bounds.device)[:, None].to(dtype) - 1.0
    floor = a * known.to(dtype)[..., None] - 1.0
    return (a > 0.0) & (a * bounds.to(dtype) <= floor)


def certified_exact(
    bounds: torch.Tensor, selection: Selection, tau: torch.Tensor, alpha: Alpha, seq_lens: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Whether a selection is exact: no page left out can hold support. bool ``[B, H_q]``.

    With every page left out at a · bound <= tau of the selection, tau of the whole row is the same, the dropped mass
    is 0 and the output is that of dense attention. A lower tau certifies too. A bound of NaN certifies nothing; at
    alpha 1 only a selection of all pages is exact.

    Args:
        bounds: ``[B, H_q, P]``, see :func:`page_bounds`.
        selection: of these rows.
        tau: ``[B, H_q]``, the threshold of entmax over the selected tokens, in the scaled domain, or a lower number.
        alpha: from 1 to 2; a number or a tensor ``[H_q]``.
        seq_lens: int32 ``[B]``.
        page_size: tokens of a page, a power of two.

    Raises:
        OptionError, FormatError, ShapeError, BatchError: an argument is out of range or does not fit.

    Rounding: a bound that was rounded down by e may hide tokens of z at most a·e above tau, of mass (a·e)^(1/a) each.
    """
    checks.floating("certified_exact", "bounds", bounds, "B, H_q, P")
    checks.floating("certified_exact", "tau", tau)
    checks.same_shape("certified_exact", "tau", tau, bounds.shape[:2], "as bounds without pages")
    page_size = checks.power_of_two("certified_exact", "page_size", page_size)
    checks.lengths("certified_exact", seq_lens, bounds.shape[0], bounds.shape[2] * page_size)
    pages = checks.int32("certified_exact", "selection.pages", selection.pages, [*bounds.shape[:2], None])
    if pages.device.type == "cpu" and pages.numel() and int(pages.max()) >= bounds.shape[2]:
        raise BatchError(
            f"certified_exact: selection.pages has {int(pages.max())}, expected below the {bounds.shape[2]} of bounds"
        )
    dtype = checks.computed_in(bounds, tau)
    a = checks.alphas("certified_exact", alpha, bounds.shape[1:2], bounds.device)[:, None].to(dtype) - 1.0
    below = (a > 0.0) & (a * bounds.to(dtype) <= tau.to(dtype)[..., None])
    left_out = scorable(seq_lens, page_size, bounds.shape[2])[:, None] & ~listed(pages, bounds.shape[2])
    return (below | ~left_out).all(-1)


def listed(pages: torch.Tensor, width: int) -> torch.Tensor:
    """Page lists int32 ``[B, H_q, W]`` as a mask, bool ``[B, H_q, width]``."""
    mask = torch.zeros(*pages.shape[:2], width + 1, dtype=torch.bool, device=pages.device)
    return mask.scatter(-1, torch.where(pages < 0, width, pages).to(torch.int64), True)[..., :width]


def check_selection(what: str, pages: object, rows: int, heads: int, sel_lens: object) -> torch.Tensor:
    """`pages` as int32 ``[B, H_q, W]``, beside `sel_lens` int32 ``[B, H_q]`` or ``None``."""
    checked = checks.int32(what, "pages", pages, [rows, heads, None])
    if checked.shape[2] == 0:
        raise ShapeError(f"{what}: pages is {list(checked.shape)}, expected at least one column")
    if sel_lens is not None:
        checks.int32(what, "sel_lens", sel_lens, [rows, heads])
    return checked

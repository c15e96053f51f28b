"""How the cached context of a batch is cut into chunks that fit a workspace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flowlib.core.errors import BatchError, OptionError
from flowlib.mla.checks import LARGEST, check_positive, integers
from flowlib.mla.ragged import RaggedBatch, check_offsets

SCHEDULES = ("packed", "even")
_WORKSPACE_CAP = 64 * 1024


def workspace_rows(max_model_len: int, max_num_seqs: int, page_size: int) -> int:
    """Rows of the workspace into which chunks of context are gathered.

    A few whole requests, or a few pages of every request, but no more than 65536 rows (in bf16 the latent rows of 576
    are 75 MB then, the up-projected keys of 128 heads of 192 already 3.2 GB), and never less than a page a request:
    ``max(min(max(8 * max_model_len, 4 * max_num_seqs * page_size), 65536), max_num_seqs * page_size)``, vLLM's rule.

    Args:
        max_model_len: tokens of the longest request.
        max_num_seqs: requests of the largest batch.
        page_size: tokens a page.

    Raises:
        OptionError: one of them is below 1.
    """
    for name, value in (("max_model_len", max_model_len), ("max_num_seqs", max_num_seqs), ("page_size", page_size)):
        check_positive("workspace_rows", name, value)
    wanted = max(8 * max_model_len, 4 * max_num_seqs * page_size)
    return max(min(wanted, _WORKSPACE_CAP), max_num_seqs * page_size)


@dataclass(frozen=True, eq=False)
class Chunk:
    """One pass over the workspace.

    Attributes:
        requests: ``(first, end)`` of the requests it holds context of; those between may have none.
        rows: ``(first, end)`` of their query rows.
        tokens: context rows.
        continues: whether its first request began in an earlier chunk.
        batch: queries, counted from ``rows[0]``, and keys of these requests.
    """

    requests: tuple[int, int]
    rows: tuple[int, int]
    tokens: int
    continues: bool
    batch: RaggedBatch


@dataclass(frozen=True, eq=False)
class ChunkedContext:
    """The cached context of a batch, cut into chunks: made once per forward pass, shared by all layers.

    ``n`` is the number of requests, ``C`` that of chunks. Tensors are int32 on the device, everything else is on the
    host, so that the loop over chunks waits for nothing.

    Attributes:
        schedule: ``"packed"`` or ``"even"``.
        page_size: tokens a page.
        workspace_rows: rows that chunks were cut for.
        context_lens: cached tokens of each request.
        num_prefills: ``n``.
        num_chunks: ``C``; 0 where nobody has context.
        max_context_chunk: most rows of one request in one chunk: the step of the even grid, the largest packed span.
        starts: ``[C, n]``, first context position of request b in chunk i; a multiple of the page size.
        lens: ``[C, n]``, context rows of request b in chunk i, 0 where it is absent.
        cu_seq_lens: ``[C, n + 1]``, first workspace row of each request, and the end.
        token_to_seq: ``[C, max_token_num_over_chunk]``, request of each workspace row, padded with 0.
        seq_tot: context rows of each chunk.
        max_seq_lens: most rows of a request, of each chunk.
        max_token_num_over_chunk: the largest of ``seq_tot``: workspace rows that are needed.
        prefill_tokens_with_context: query tokens up to and including the last request with context; those from there
            on have none. Before it, ``gaps`` have none either.
        covered: requests with context.
        gaps: ``(first, end)`` ranges of query tokens without context before ``prefill_tokens_with_context``.
        queries: all query tokens against themselves, for the causal part.
        chunks: one :class:`Chunk` each.
    """

    schedule: str
    page_size: int
    workspace_rows: int
    context_lens: tuple[int, ...]
    max_context_chunk: int
    starts: torch.Tensor
    lens: torch.Tensor
    cu_seq_lens: torch.Tensor
    token_to_seq: torch.Tensor
    seq_tot: tuple[int, ...]
    max_seq_lens: tuple[int, ...]
    prefill_tokens_with_context: int
    covered: tuple[int, ...]
    gaps: tuple[tuple[int, int], ...]
    queries: RaggedBatch
    chunks: tuple[Chunk, ...]

    @property
    def num_prefills(self) -> int:
        """Requests."""
        return len(self.context_lens)

    @property
    def num_chunks(self) -> int:
        """Chunks."""
        return len(self.chunks)

    @property
    def chunk_total_token(self) -> tuple[int, ...]:
        """Context rows of each chunk; another name of ``seq_tot``."""
        return self.seq_tot

    @property
    def max_token_num_over_chunk(self) -> int:
        """Workspace rows of the largest chunk."""
        return max(self.seq_tot, default=0)

    @property
    def num_tokens(self) -> int:
        """Query tokens."""
        return self.queries.num_queries

    @property
    def query_start_loc(self) -> torch.Tensor:
        """int32 ``[n + 1]``, first query token of each request, and the end."""
        return self.queries.query_start_loc

    @property
    def continues(self) -> tuple[bool, ...]:
        """Of each chunk, whether its first request began in an earlier one."""
        return tuple(chunk.continues for chunk in self.chunks)


def build_chunked_context(
    context_lens: torch.Tensor | Sequence[int],
    query_start_loc: torch.Tensor | Sequence[int],
    workspace_rows: int,
    page_size: int,
    schedule: str = "packed",
    device: str | torch.device | None = None,
) -> ChunkedContext:
    """Cuts the context of a batch into chunks.

    ``"packed"`` fills the workspace request after request and cuts one only where it does not fit, at a page. A long
    request takes nothing from the others, and only the first request of a chunk may continue an earlier one.
    ``"even"`` gives every request with context the same share of the workspace, rounded down to pages (vLLM's grid).

    Args:
        context_lens: cached tokens of each of the n requests; ints, or an integer tensor (on a device: waited for).
        query_start_loc: first new token of each request, and the end: ``n + 1`` offsets from 0.
        workspace_rows: rows of the workspace, from :func:`workspace_rows`.
        page_size: tokens a page.
        schedule: ``"packed"`` or ``"even"``.
        device: where the index tensors go; ``None`` takes that of `query_start_loc`, the CPU for ints.

    Raises:
        OptionError: unknown schedule, or a workspace too small for a page (a page of each request, if even).
        FormatError, BatchError: lengths or offsets that are none.
    """
    what = "build_chunked_context"
    if schedule not in SCHEDULES:
        raise OptionError(f"{what}: schedule is {schedule!r}, expected 'packed' or 'even'")
    check_positive(what, "workspace_rows", workspace_rows)
    check_positive(what, "page_size", page_size)
    lens = integers(what, "context_lens", context_lens)
    offsets = check_offsets(what, "query_start_loc", query_start_loc)
    if len(offsets) != len(lens) + 1:
        raise BatchError(
            f"{what}: query_start_loc has {len(offsets)} offsets, expected {len(lens) + 1}, one more than the "
            f"{len(lens)} context_lens"
        )
    if sum(lens) > LARGEST:
        raise BatchError(f"{what}: context_lens add up to {sum(lens)} tokens, expected at most {LARGEST}")
    if device is None:
        device = query_start_loc.device if isinstance(query_start_loc, torch.Tensor) else "cpu"
    cut = _packed if schedule == "packed" else _even
    starts, spans, step = cut(lens, workspace_rows, page_size)
    return _assemble(schedule, page_size, workspace_rows, lens, offsets, starts, spans, step, torch.device(device))


def _packed(lens: list[int], workspace: int, page: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Starts and lengths int64 ``[C, n]`` and the longest span."""
    if any(lens) and workspace < page:
        raise OptionError(
            f"build_chunked_context: workspace_rows is {workspace}, expected at least one page of {page} tokens"
        )
    spans, chunk, free = [], 0, workspace
    for request, length in enumerate(lens):
        start = 0
        while start < length:
            piece = length - start if length - start <= free else free // page * page
            if piece:
                spans.append((chunk, request, start, piece))
                start, free = start + piece, free - piece
            if start < length:
                chunk, free = chunk + 1, workspace
    starts = torch.zeros(chunk + 1 if spans else 0, len(lens), dtype=torch.int64)
    counts = torch.zeros_like(starts)
    if spans:
        i, b, first, length = torch.tensor(spans).unbind(1)
        starts[i, b], counts[i, b] = first, length
    return starts, counts, max((s[3] for s in spans), default=0)


def _even(lens: list[int], workspace: int, page: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Starts and lengths int64 ``[C, n]`` and the step of the grid."""
    sharing = sum(n > 0 for n in lens)
    if not sharing:
        return torch.zeros(0, len(lens), dtype=torch.int64), torch.zeros(0, len(lens), dtype=torch.int64), 0
    step = workspace // sharing // page * page
    if step == 0:
        raise OptionError(
            f"build_chunked_context: workspace_rows is {workspace}, expected at least {sharing * page}: a page of "
            f"{page} tokens for each of the {sharing} requests with context (schedule='packed' needs one page)"
        )
    starts = (torch.arange(-(-max(lens) // step)) * step)[:, None].expand(-1, len(lens)).contiguous()
    counts = (torch.tensor(lens)[None, :] - starts).clamp(min=0, max=step)
    return starts, counts, step


def _assemble(
    schedule: str, page: int, workspace: int, lens: list[int], offsets: list[int],
    starts: torch.Tensor, counts: torch.Tensor, step: int, device: torch.device,
) -> ChunkedContext:  # fmt: skip
    rows, firsts = counts.tolist(), starts.tolist()
    totals, longest = tuple(map(sum, rows)), tuple(map(max, rows))
    parts = [_part(row, first, offsets) for row, first in zip(rows, firsts, strict=True)]
    covered = tuple(b for b, n in enumerate(lens) if n)
    limit = offsets[covered[-1] + 1] if covered else 0
    ends = torch.nn.functional.pad(counts.cumsum(1), (1, 0))
    index = [starts, counts, ends, _owners(counts, totals), torch.tensor(offsets)]
    index += [torch.tensor(x) for part in parts for x in part[3:]]
    starts, counts, ends, owners, whole, *rest = _upload(index, device)
    chunks = tuple(
        Chunk(requests, tokens, total, goes_on, RaggedBatch(queries, keys, rest[2 * i], rest[2 * i + 1]))
        for i, (total, (requests, tokens, goes_on, queries, keys)) in enumerate(zip(totals, parts, strict=True))
    )
    return ChunkedContext(
        schedule, page, workspace, tuple(lens), step, starts, counts, ends, owners, totals, longest, limit, covered,
        _gaps(lens, offsets, limit), RaggedBatch(tuple(offsets), tuple(offsets), whole, whole), chunks,
    )  # fmt: skip


def _owners(counts: torch.Tensor, totals: Sequence[int]) -> torch.Tensor:
    """Request of each workspace row of each chunk, padded with 0."""
    owners = torch.zeros(len(totals), max(totals, default=0), dtype=torch.int64)
    for row, lengths, total in zip(owners, counts, totals, strict=True):
        row[:total] = torch.repeat_interleave(lengths)
    return owners


_Part = tuple[tuple[int, int], tuple[int, int], bool, tuple[int, ...], tuple[int, ...]]


def _part(counts: list[int], starts: list[int], offsets: list[int]) -> _Part:
    """Of one chunk: requests, query rows, whether it continues an earlier one, query and key offsets."""
    present = [b for b, n in enumerate(counts) if n]
    first, end = present[0], present[-1] + 1
    queries = tuple(o - offsets[first] for o in offsets[first : end + 1])
    keys = [0]
    for n in counts[first:end]:
        keys.append(keys[-1] + n)
    return (first, end), (offsets[first], offsets[end]), starts[first] > 0, queries, tuple(keys)


def _gaps(lens: list[int], offsets: list[int], limit: int) -> tuple[tuple[int, int], ...]:
    """Ranges of query tokens without context before `limit`, neighbours joined."""
    found: list[tuple[int, int]] = []
    for b, n in enumerate(lens):
        first, end = offsets[b : b + 2]
        if n or first == end or end > limit:
            continue
        if found and found[-1][1] == first:
            first = found.pop()[0]
        found.append((first, end))
    return tuple(found)


def _upload(index: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """int32 copies on the device, in one transfer; each begins at a multiple of 16 bytes."""
    sizes = [-(-x.numel() // 4) * 4 for x in index]
    whole = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    first = 0
    for x, size in zip(index, sizes, strict=True):
        whole[first : first + x.numel()] = x.flatten()
        first += size
    pieces = whole.to(device, non_blocking=True).split(sizes)
    return [piece[: x.numel()].view(x.shape) for piece, x in zip(pieces, index, strict=True)]

"""The calls around a CUDA graph: static buffers, lengths and requests that change between replays, padded rows."""

import pytest

from flowlib.sglang.graphs import SHORT


@pytest.fixture
def answer(objects):
    return objects["graph"]


def test_replays_with_other_requests_and_lengths_give_the_reference(answer):
    # fp32 against fp32: sums of at most 96 terms of size about 1, in another order
    assert answer["worst"] <= 96 * 2**-23


def test_every_replay_uses_the_buffers_of_the_capture(answer):
    assert answer["buffers"] == 2, "one per layer: the layers' softmax scales differ"


def test_padded_rows_have_one_token(answer):
    assert answer["fill"] == 1


def test_what_a_graph_counts_is_what_the_reference_counts(answer):
    kernels, reference = answer["counts"]
    assert kernels == reference
    assert kernels["pages_attended"] < kernels["pages_cached"]
    assert kernels["dense_steps"] + kernels["sparse_steps"] == 7, "of nine rows two are padded"


def test_what_a_layer_asks_for_beyond_attention_is_refused(answer):
    said = answer["refused"]
    assert said["sinks"] == "layer 0 attends with sinks, which a flow can't serve"
    for name in ("written elsewhere", "another layer's"):
        assert said[name] == "layer 0 does not write its K and V through the pool, so a flow can't serve it"
    assert said["prefill"] == "prefill reached the attention backend 'flowlib', which only decodes"
    assert said["nothing given"] is None


def test_short_batches_have_a_graph_that_neither_scores_nor_selects(answer):
    short = answer["short"]
    assert (short["width"], short["limit"]) == (3, 48), "one chosen page, the first and the last"
    # fp32 against fp32: sums of at most 48 terms of size about 1, in another order
    assert short["worst"] <= 48 * 2**-23


def test_a_batch_is_replayed_by_the_graph_of_its_longest_request(answer):
    keys = answer["short"]["keys"]
    assert keys == {"short": SHORT, "one long": None, "nobody": SHORT, "unknown": None}


def test_a_batch_size_is_captured_twice(answer):
    (label, first), (_, second) = answer["short"]["captured"]
    assert (label, first, second) == (SHORT, True, False)


@pytest.mark.parametrize("case", [0, 1], ids=["data parallel attention", "another backend"])
def test_elsewhere_nothing_more_is_captured(answer, case):
    """Ranks of data parallel attention have other lengths each, and must replay the same graph."""
    without = answer["short"]["without"][case]
    assert [short for _, short in without["captured"]] == [False]
    assert without["key"] is None

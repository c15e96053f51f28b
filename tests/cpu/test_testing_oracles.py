"""The oracles against numbers worked out by hand."""

import math

import pytest
import torch

import flowlib
from flowlib.errors import OptionError
from flowlib.testing import Oracle, attention, dense_attention, has_oracle, oracle_of, tokens_of

SPEC = flowlib.Spec(page_size=2, head_dim=2, group_size=2, num_kv_heads=1, kv_dtype=torch.float32, top_k=2)
K = torch.tensor([[[1.0, -2.0], [3.0, 4.0]], [[-5.0, 0.0], [-1.0, 6.0]]], dtype=torch.float64)  # two pages
V = torch.tensor([[[3.0, 4.0], [0.0, 1.0]], [[0.0, 0.0], [6.0, 8.0]]], dtype=torch.float64)
Q = torch.tensor([[1.0, 2.0], [3.0, -4.0]], dtype=torch.float64)  # mean [2, -1]


def scores(name: str, spec: flowlib.Spec = SPEC, **options: object) -> list[float]:
    oracle = oracle_of(name, **options)
    values = oracle.scores(Q, {"k": K, "v": V, **oracle.fields(K, V, spec)}, spec)
    assert values is not None
    return values.flatten().tolist()


def softmax(*logits: float) -> list[float]:
    weights = [math.exp(s) for s in logits]
    return [w / sum(weights) for w in weights]


def test_mean_keys():
    # centroids [2, 1] and [-3, 3]
    assert scores("block_sparse_attention") == [3.0, -9.0]
    assert scores("centered_block_sparse_attention") == [6.0, -6.0]
    assert scores("venergy_gated_centroid") == [3.0 * 3.0, -9.0 * 5.0]
    heads = [softmax(2.0 * 0.5, 1.5), softmax(1.0, -10.5)]  # scale 1/2: [4, 3] and [2, -21]
    assert scores("gqa_block_sparse_attention", scale=0.5) == pytest.approx(
        [max(a, b) for a, b in zip(softmax(2.0, 1.5), heads[1], strict=True)]
    )


def test_quest():
    # maxima [3, 4], [-1, 6]; minima [1, -2], [-5, 0]
    assert scores("quest_sparse_attention") == [6.0 + 2.0, -2.0 + 0.0]
    assert scores("gqa_quest_sparse_attention") == [max(3 + 8, 9 + 8), max(-1 + 12, -3 + 0)]
    assert scores("masked_quest_sparse_attention") == [6.0, -2.0]
    assert scores("masked_quest_sparse_attention", start=1, end=2) == [2.0, 0.0]


def test_gaussian():
    # means [2, 1], [-3, 3]; standard deviations [1, 3], [2, 3]
    spread = [[math.hypot(1, 6), math.hypot(3, 12)], [math.hypot(2, 6), math.hypot(6, 12)]]
    wanted = [max(4 + 2 * spread[0][0], 2 + 2 * spread[0][1]), max(3 + 2 * spread[1][0], -21 + 2 * spread[1][1])]
    assert scores("gaussian_sparse_attention", z=2.0) == pytest.approx(wanted)


def test_sub_blocks_are_runs_of_sixteen_tokens():
    k = torch.zeros(1, 32, 2, dtype=torch.float64)
    k[0, 3], k[0, 20] = torch.tensor([16.0, 0.0]), torch.tensor([0.0, -32.0])
    spec = SPEC.replace(page_size=32)
    lserve, centroid = oracle_of("lserve_sparse_attention"), oracle_of("lserve_centroid_sparse_attention")
    assert lserve.fields(k, k, spec)["k_max"].tolist() == [[[16.0, 0.0], [0.0, 0.0]]]
    assert lserve.scores(Q, lserve.fields(k, k, spec), spec).tolist() == [[32.0]]
    assert centroid.fields(k, k, spec)["centroid"].tolist() == [[[1.0, 0.0], [0.0, -2.0]]]
    assert centroid.scores(Q, centroid.fields(k, k, spec), spec).tolist() == [[2.0]]


def test_h2o_pages():
    assert scores("h2o_sparse_attention", w_avg=2.0) == [2 * 3.0 + 8.0, 2 * -9.0 - 2.0]
    assert scores("gqa_h2o_sparse_attention") == [max(4 + 11, 2 + 17), max(3 + 11, -21 - 3)]


@pytest.mark.parametrize("decay", [0.984375, 1.0])
@pytest.mark.parametrize("name", ["h2o_token_sparse_attention", "gqa_h2o_token_sparse_attention"])
def test_h2o_tokens_gain_one_of_mass_a_step(name, decay):
    oracle, spec = oracle_of(name, decay=decay), SPEC.replace(page_size=1)
    k = K.view(4, 1, 2)
    state = oracle.fields(k, k, spec)["hh_score"]
    assert state.tolist() == [[[0.0]]] * 4
    for _ in range(5):
        state = oracle.state(Q, {"k": k, "hh_score": state}, spec)["hh_score"]
    assert float(state.sum()) == pytest.approx(sum(decay**i for i in range(5)))


def test_a_running_sum_decays():
    oracle = oracle_of("running_avg_block_sparse_attention")
    pages = oracle.fields(K, V, SPEC)
    pages["running"] = pages["running"] + 4.0
    assert oracle.scores(Q, pages, SPEC).tolist() == [[3.0 + 2.0, -9.0 + 2.0]]
    assert oracle.state(Q, pages, SPEC)["running"].flatten().tolist() == [5.0, -7.0]


def test_twilight_keeps_the_fewest_pages():
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0], dtype=torch.float64)  # masses 0.032, 0.644, 0.087, 0.237 at scale 1
    spec = SPEC.replace(scale=1.0)
    for p, wanted in ((0.5, [1]), (0.65, [1, 3]), (0.88, [1, 3]), (0.9, [1, 2, 3]), (1.0, [0, 1, 2, 3])):
        surely, perhaps = oracle_of("twilight_attention", p=p).kept(logits, spec)
        assert surely.nonzero().flatten().tolist() == wanted
        assert perhaps.tolist() == surely.tolist()
    surely, perhaps = oracle_of("twilight_attention", p=0.644).kept(logits, spec, slack=0.01)
    assert (surely.sum(), perhaps.sum()) == (1, 2), "a page at the edge may be either"


def test_streaming_scores_nothing():
    assert oracle_of("streaming_attention").scores(Q, {}, SPEC) is None
    assert oracle_of("streaming_attention").counts(torch.zeros(9), 11, SPEC) == (0, 0)


@pytest.mark.parametrize(
    ("values", "ratio", "pages", "count"),
    [([1.0, 2.0, 3.0], 0.0, 5, 2), ([1.0], 0.0, 5, 1), ([], 0.0, 2, 0), ([1.0, -math.inf, math.nan], 0.0, 5, 1),
     ([1.0] * 30, 0.25, 31, 7), ([1.0] * 30, 0.1, 20, 2), ([math.inf, 0.0, 0.0], 0.0, 5, 2)],
)  # fmt: skip
def test_budget(values, ratio, pages, count):
    counted = Oracle().counts(torch.tensor(values), pages, SPEC.replace(top_k_ratio=ratio))
    assert counted == (count, count)


def test_attention():
    q = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    k = torch.tensor([[1.0, 5.0], [0.0, 7.0], [-3.0, 1.0]], dtype=torch.float64)
    v = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, -1.0]], dtype=torch.float64)
    spec = SPEC.replace(scale=0.5)
    done = attention(q, k, v, [0, 1, 2], 2, spec)
    weights = softmax(1.0, 0.0, -3.0)
    assert done.o[0].tolist() == pytest.approx([weights[0], weights[1], -weights[2]])
    assert done.mass[0].tolist() == pytest.approx(weights)
    assert float(done.lse[0]) == pytest.approx(math.log(math.e + 1 + math.exp(-3)))
    assert float(done.logit[0]) == 3.0
    biased = attention(q, k, v, [0, 4, 5], 5, spec, slopes=[0.5])
    assert float(biased.lse[0]) == pytest.approx(math.log(math.exp(1 - 2.5) + math.exp(-0.5) + math.exp(-3)))
    torch.testing.assert_close(dense_attention(q, k, v, spec).o, done.o)


def test_attention_to_nothing():
    done = attention(Q, K[:0, 0], V[:0, 0], [], 0, SPEC)
    assert done.o.tolist() == [[0.0, 0.0]] * 2
    assert done.lse.tolist() == [-math.inf] * 2


def test_tokens_of_pages_end_with_the_request():
    assert tokens_of([0, 3], 11, 3) == [0, 1, 2, 9, 10]
    assert tokens_of([], 11, 3) == []


def test_oracles_by_name():
    assert has_oracle("quest")
    assert type(oracle_of("quest")) is type(oracle_of("gqa_quest_sparse_attention"))
    assert not has_oracle("nothing")
    with pytest.raises(OptionError, match="flow 'qest' has no oracle"):
        oracle_of("qest")
    with pytest.raises(OptionError, match=r"the oracle of 'quest' does not take the options \['p'\]"):
        oracle_of("quest", p=3)

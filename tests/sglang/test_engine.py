"""Flows inside stock SGLang on a CPU: chunked prefill, radix hits, the overlap schedule and ragged batches.

An engine takes long to start: what does not differ between versions of SGLang is tested on one.
"""

import json
import os

import pytest

from tests.sglang.engine import generate, read_trace, with_plugin

QUEST = "gqa_quest_sparse_attention"
PAGE = 16
NEW_TOKENS = 10
TOP_K, BOS, EOS = 4, 2, 3


def waves(prompts):
    """The eight prompts at once, then the same with longer ends: those hit the radix cache, partial pages included."""
    return [[prompts, NEW_TOKENS], [[[*p, 5, 6, 7, 8, 9] for p in prompts], NEW_TOKENS]]


def traced_rows(sglang):
    """Rows of the traces of two waves: the first token is the prefill's."""
    return 2 * 8 * (NEW_TOKENS - 1 + sglang.steps_past_the_end)


@pytest.fixture(scope="session")
def dense(tiny_model, prompts, tmp_path_factory):
    """Answers of stock SGLang; one version answers for all, in fp32 they have the same tokens."""
    folder = tmp_path_factory.mktemp("dense")
    return generate(folder, waves(prompts), model_path=str(tiny_model), page_size=PAGE, chunked_prefill_size=256)


@pytest.fixture(scope="module")
def covering(sglang, tiny_model, prompts, tmp_path_factory):
    """Answers, trace and ``/server_info`` with a budget that covers every context."""
    folder = tmp_path_factory.mktemp("covering")
    config = {"top_k": 90, "trace": {"path": str(folder / "trace.jsonl"), "mass": True}}
    answers = generate(
        folder,
        waves(prompts),
        sglang.environment(),
        model_path=str(tiny_model),
        chunked_prefill_size=256,
        flow=QUEST,
        flow_config=config,
    )
    return answers, read_trace(folder / "trace.jsonl"), json.loads((folder / "info.json").read_text())


@pytest.fixture(scope="module")
def small(sglang, tiny_model, prompts, tmp_path_factory):
    """Answers, trace and page check with a budget of a few pages."""
    folder = tmp_path_factory.mktemp("small")
    config = {"top_k": TOP_K, "bos": BOS, "eos": EOS, "trace": {"path": str(folder / "trace.jsonl"), "pages": True}}
    env = with_plugin(folder, "page_check") | {"PAGE_CHECK_REPORT": str(folder / "report.jsonl")}
    answers = generate(
        folder,
        waves(prompts),
        sglang.environment(env),
        model_path=str(tiny_model),
        chunked_prefill_size=256,
        flow=QUEST,
        flow_config=config,
    )
    return answers, read_trace(folder / "trace.jsonl"), read_trace(folder / "report.jsonl")


def tokens(answers):
    return [[answer["output_ids"] for answer in wave] for wave in answers]


def test_dense_tokens_vary(dense):
    assert all(len(set(ids)) > 3 for ids in tokens(dense)[0]), "equal tokens would show little"


def test_covering_budget_gives_the_dense_tokens(dense, covering):
    answers, _, _ = covering
    assert tokens(answers) == tokens(dense)
    hits = [answer["cached_tokens"] for answer in answers[1]]
    assert min(hits) > 200, f"the radix cache was not hit: {hits}"


def test_covering_budget_attends_to_everything(covering, sglang):
    _, trace, _ = covering
    assert sum(len(line["cached"]) for line in trace) == traced_rows(sglang)
    for line in trace:
        for layer in line["layers"].values():
            assert layer["attended"] == [[pages] * 2 for pages in line["cached"]]
            assert all(abs(mass - 1.0) < 1e-4 for row in layer["mass"] for mass in row)


def test_the_engine_tells_its_version_and_flow(covering, sglang):
    _, _, info = covering
    assert info["version"] == sglang.version
    assert (info["flow"], info["decode_attention_backend"], info["page_size"]) == (QUEST, "flowlib", PAGE)
    served = info["flow_served"]
    assert served["budget"] == {"top_k": 90, "top_k_ratio": 0.0, "bos": 1, "eos": 1, "dense_below": 0, "page_size": 16}
    nbytes = 2 * 2 * 2 * 64 * 4 // PAGE  # layers, kv heads, k_max and k_min of 64 float32 each
    assert (served["flow"], served["sparse_layers"], served["field_bytes_per_token"]) == (QUEST, 2, nbytes)


def test_small_budget_attends_to_exactly_its_pages(small, sglang):
    _, trace, _ = small
    assert sum(len(line["cached"]) for line in trace) == traced_rows(sglang)
    budget = TOP_K + BOS + EOS
    for line in trace:
        assert set(line["layers"]) == {"0", "1"}
        for layer in line["layers"].values():
            assert layer["attended"] == [[min(budget, pages)] * 2 for pages in line["cached"]]
            assert all(budget < pages for pages in line["cached"])
            for pages, rows in zip(line["cached"], layer["pages"], strict=True):
                for chosen in rows:
                    assert chosen == sorted(set(chosen))
                    assert set(range(BOS)) | set(range(pages - EOS, pages)) <= set(chosen)


def test_small_budget_changes_tokens_but_not_the_first(dense, small):
    answers, _, _ = small
    assert tokens(answers) != tokens(dense)
    assert [ids[0] for ids in tokens(answers)[0]] == [ids[0] for ids in tokens(dense)[0]], "prefill is dense"


def test_summaries_of_all_live_pages_equal_a_recomputation(small):
    _, trace, report = small
    assert len(report) == len(trace)
    assert max(line["pages"] for line in report) > 300
    assert {line["layers"] for line in report} == {2}
    assert [line["wrong"] for line in report] == [0] * len(report)


def test_dense_layers_attend_to_everything(tiny_model, prompts, dense, tmp_path):
    """The second layer is dense, and the first one's budget covers everything: dense tokens."""
    config = {"top_k": 90, "dense_layers": [1], "trace": str(tmp_path / "trace.jsonl")}
    answers = generate(
        tmp_path, waves(prompts)[:1], model_path=str(tiny_model), flow=QUEST, flow_config=config, page_size=PAGE
    )
    assert tokens(answers) == tokens(dense)[:1]
    for line in read_trace(tmp_path / "trace.jsonl"):
        assert [layer.get("dense", False) for layer in line["layers"].values()] == [False, True]


def test_triton_gives_the_reference_tokens(tiny_model, prompts, tmp_path):
    wave = [[[prompts[0][:70], prompts[1][:101]], 4]]
    found = {}
    for impl in ("reference", "triton"):
        trace = {"path": str(tmp_path / f"{impl}.jsonl"), "pages": True}
        config = {"top_k": 2, "impl": impl, "trace": trace, "dense_below": 0}
        answers = generate(
            tmp_path / impl, wave, timeout=250, model_path=str(tiny_model), flow=QUEST, flow_config=config
        )
        trace = read_trace(tmp_path / f"{impl}.jsonl")
        found[impl] = tokens(answers), [json.dumps(line["layers"]) for line in trace]
    assert found["triton"] == found["reference"]
    assert len(found["triton"][1]) == 4


def test_retracted_requests_go_on_with_the_dense_tokens(tiny_model, prompts, dense, tmp_path):
    config = {"top_k": 90, "trace": str(tmp_path / "trace.jsonl")}
    env = with_plugin(tmp_path, "page_check") | {"PAGE_CHECK_REPORT": str(tmp_path / "report.jsonl")}
    env |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "4"}
    answers = generate(tmp_path, waves(prompts)[:1], env, model_path=str(tiny_model), flow=QUEST, flow_config=config)
    assert tokens(answers) == tokens(dense)[:1]
    assert min(len(line["cached"]) for line in read_trace(tmp_path / "trace.jsonl")) < 8, "nothing was retracted"
    assert [line["wrong"] for line in read_trace(tmp_path / "report.jsonl") if line["wrong"]] == []


def test_two_ranks_attend_to_their_own_heads(tiny_model, prompts, dense, tmp_path):
    """Tensor parallelism: each rank has one of the kv heads, and a budget that covers everything gives dense tokens."""
    config = {"top_k": 90, "trace": str(tmp_path / "trace.jsonl")}
    env = {**os.environ, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    wave = [[prompts[:2], NEW_TOKENS]]
    answers = generate(tmp_path, wave, env, model_path=str(tiny_model), tp_size=2, flow=QUEST, flow_config=config)
    assert tokens(answers)[0] == tokens(dense)[0][:2]
    for rank in range(2):
        trace = read_trace(tmp_path / f"trace.jsonl.rank{rank}")
        assert len(trace) >= NEW_TOKENS - 1
        for line in trace:
            for layer in line["layers"].values():
                assert layer["attended"] == [[pages] for pages in line["cached"]]


@pytest.mark.parametrize("page", [1, 64])
def test_pages_of_other_sizes(page, tiny_model, prompts, dense, tmp_path):
    """A covering budget gives the dense tokens, a small one attends to its pages, and summaries are what K gives."""
    env = with_plugin(tmp_path, "page_check") | {"PAGE_CHECK_REPORT": str(tmp_path / "report.jsonl")}
    options = {"model_path": str(tiny_model), "page_size": page, "chunked_prefill_size": 256, "flow": QUEST}
    covering = generate(tmp_path / "all", waves(prompts), env, flow_config={"top_k": 1500 // page}, **options)
    assert tokens(covering) == tokens(dense)
    report = read_trace(tmp_path / "report.jsonl")
    assert sum(line["pages"] for line in report) > 0
    assert [line["wrong"] for line in report] == [0] * len(report)
    config = {"top_k": 3, "bos": 1, "eos": 1, "trace": str(tmp_path / "trace.jsonl")}
    generate(tmp_path / "few", waves(prompts)[:1], flow_config=config, **options)
    for line in read_trace(tmp_path / "trace.jsonl"):
        for layer in line["layers"].values():
            assert layer["attended"] == [[5, 5]] * len(line["cached"])


def test_data_parallel_schedulers_share_the_requests(sglang, tiny_model, prompts, dense, tmp_path):
    """Two schedulers with a pool and fields each; a budget that covers everything gives dense tokens."""
    cores = {"0.5.16": "0-1", "0.5.23": "0|1"}[sglang.version]  # of each scheduler
    env = sglang.environment({**os.environ, "SGLANG_CPU_OMP_THREADS_BIND": cores})
    answers = generate(
        tmp_path, waves(prompts), env, model_path=str(tiny_model), dp_size=2, flow=QUEST, flow_config={"top_k": 90},
        chunked_prefill_size=256,
    )  # fmt: skip
    assert tokens(answers) == tokens(dense)
    states = json.loads((tmp_path / "info.json").read_text())["internal_states"]
    assert len(states) == 2


def test_an_fp8_pool_is_served(tiny_model, prompts, tmp_path):
    """Against stock Triton decoding over the same pool, and in both implementations; Triton's own interpreter rounds
    bfloat16 wrong, so SGLang's kernels run in the repaired one."""
    env = with_plugin(tmp_path, "interpreter_repair") | {"TRITON_INTERPRET": "1"}
    options = {"model_path": str(tiny_model), "page_size": PAGE, "dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}
    wave = [[[prompts[0][:70], prompts[1][:101]], 8]]

    def flow(top_k, impl):
        config = {"top_k": top_k, "impl": impl, "dense_below": 0}
        return tokens(
            generate(
                tmp_path / f"{impl}{top_k}", wave, env, flow=QUEST, flow_config=config,
                prefill_attention_backend="triton", **options,
            )
        )  # fmt: skip

    stock = tokens(generate(tmp_path / "dense", wave, env, attention_backend="triton", **options))
    assert flow(90, "triton") == stock
    few = flow(2, "triton")
    assert few == flow(2, "reference")
    assert few != stock

"""Flows over MLA latents inside stock SGLang on a CPU: prefill over prefixes in chunks, and sparse decoding."""

import json
import sys

import pytest
import torch

from tests.sglang import latent_model
from tests.sglang.engine import ENGINE, HERE, read_trace, run, with_plugin

pytestmark = pytest.mark.timeout(900)  # three engines start before the first test

NEW_TOKENS = 5
LENGTHS = (70, 150, 290, 333)
BUDGET = {"top_k": 1, "bos": 1, "eos": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder of the model."""
    made = tmp_path_factory.mktemp("latents")
    latent_model.write(made)
    return made


@pytest.fixture(scope="module")
def waves():
    """Four prompts at once, two of which begin alike; then the same with longer ends, which hit the radix cache."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, latent_model.VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    prompts[3][:128] = prompts[2][:128]
    return [[prompts, NEW_TOKENS], [[[*p, 5, 6, 7, 8, 9] for p in prompts], NEW_TOKENS]]


def job(folder, model, name, waves, env=(), **engine):
    """An engine that decodes with a flow, traced to ``folder/name.trace``."""
    config = dict(engine.pop("flow_config")) | {"trace": {"path": str(folder / f"{name}.trace"), "pages": True}}
    env = {"LATENT_REPORT": str(folder / f"{name}.report"), **dict(env)}
    engine = ENGINE | {"model_path": str(model), "flow_config": config, "max_total_tokens": 4096} | engine
    return {"env": env, "engine": engine, "waves": waves}


@pytest.fixture(scope="module")
def served(folder, waves, tmp_path_factory):
    """What each engine answered, traced and reported."""
    here = tmp_path_factory.mktemp("served")
    short = [[[p[:n] for p, n in zip(waves[0][0], (40, 75), strict=False)], 3]]
    short.append([[[*p, 5, 6, 7] for p in short[0][0]], 3])
    jobs = {
        "covering": job(
            here, folder, "covering", waves, {"SGLANG_MAX_KV_CHUNK_CAPACITY": "64"}.items(),
            flow="quest_mla", flow_config={"top_k": 90}, chunked_prefill_size=128,
        ),
        "small": job(
            here, folder, "small", waves, flow="lserve_centroid_mla", flow_config=BUDGET, chunked_prefill_size=128
        ),
        "triton": job(
            here, folder, "triton", short,
            {"SGLANG_MAX_KV_CHUNK_CAPACITY": "32", "SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD": "70"}.items(),
            flow="rope_aware_block_sparse_mla", flow_config={"top_k": 200}, page_size=1, attention_backend="triton",
        ),
    }  # fmt: skip
    (here / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, str(HERE / "latent_job.py"), str(here / "jobs.json"), str(here / "answers.json")]
    ended = run(command, timeout=800, env=with_plugin(here, "latent_check"))
    assert ended.code == 0, ended.text[-6000:]
    answers = json.loads((here / "answers.json").read_text())
    notes = {name: read_trace(here / f"{name}.report") for name in jobs}
    return {
        name: {
            "waves": jobs[name]["waves"], "answers": answers[name], "trace": read_trace(here / f"{name}.trace"),
            "steps": [line for line in notes[name] if "pages" in line],
            "prefills": [line for line in notes[name] if "chunks" in line],
        }
        for name in jobs
    }  # fmt: skip


@pytest.mark.parametrize("name", ["covering", "triton"])
def test_covering_budgets_give_the_tokens_of_the_float64_model(name, folder, served):
    model, seen = latent_model.Model(folder), set()
    for (prompts, _), answers in zip(served[name]["waves"], served[name]["answers"], strict=True):
        for prompt, (tokens, _) in zip(prompts, answers, strict=True):
            assert model.next_tokens(prompt + tokens)[len(prompt) - 1 : -1] == tokens
            seen |= set(tokens)
    assert len(seen) > 8, "equal tokens would show little"


def test_covering_budgets_attend_to_everything(served):
    for line in served["covering"]["trace"]:
        for layer in line["layers"].values():
            assert layer["attended"] == [[pages] for pages in line["cached"]]


def test_prefixes_go_in_packed_chunks_beside_requests_without_one(served):
    assert min(cached for _, cached in served["covering"]["answers"][1]) >= 64, "the radix cache was not hit"
    prefills = served["covering"]["prefills"]
    for line in prefills:
        for chunk in line["chunks"]:
            assert 0 < sum(chunk) <= 64
        assert [sum(column) for column in zip(*line["chunks"], strict=True)] == line["context"] * bool(line["chunks"])
    assert max(len(line["chunks"]) for line in prefills) >= 4
    assert any(0 in line["context"] and any(line["context"]) for line in prefills)
    assert any(0 in chunk for line in prefills for chunk in line["chunks"])


def test_the_triton_backend_goes_in_chunks_from_the_threshold_on(served):
    prefills = served["triton"]["prefills"]
    assert prefills, "SGLang attended absorbed"
    assert all(sum(line["context"]) >= 70 and len(line["chunks"]) >= 3 for line in prefills)
    assert {line["attention"] for line in prefills} == {"reference"}


def test_small_budgets_attend_to_exactly_their_pages(served):
    budget = sum(BUDGET.values())
    counted = 0
    for line in served["small"]["trace"]:
        for layer in line["layers"].values():
            assert layer["attended"] == [[min(budget, pages)] for pages in line["cached"]]
            for pages, (chosen,) in zip(line["cached"], layer["pages"], strict=True):
                assert chosen == sorted(set(chosen))
                assert {0, pages - 1} <= set(chosen)
        counted += sum(pages > budget for pages in line["cached"])
    assert counted >= 2 * 2 * (NEW_TOKENS - 1)


def test_small_budgets_change_tokens_but_not_the_first(served, folder):
    model = latent_model.Model(folder)
    prompts, answers = served["small"]["waves"][0][0], served["small"]["answers"][0]
    dense = [model.next_tokens(p + tokens)[len(p) - 1 : -1] for p, (tokens, _) in zip(prompts, answers, strict=True)]
    assert [tokens[0] for tokens, _ in answers] == [tokens[0] for tokens in dense], "prefill is dense"
    assert [tokens for tokens, _ in answers] != dense


@pytest.mark.parametrize("name", ["covering", "small", "triton"])
def test_fields_of_all_live_pages_equal_a_recomputation(name, served):
    steps = served[name]["steps"]
    assert len(steps) == len(served[name]["trace"])
    assert min(line["pages"] for line in steps) > 0
    assert {line["layers"] for line in steps} == {latent_model.LAYERS}
    assert [line["wrong"] for line in steps] == [0] * len(steps)

"""``sglang serve --flow`` answers over HTTP."""

import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest
from flowlib_cpu_host import cpu_environment

from tests.sglang.engine import SERVE, kill_group, read_trace

FLOW = "gqa_quest_sparse_attention"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def ask(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or b"null")


def wait_until_healthy(url, process, seconds=90):
    for _ in range(seconds * 2):
        if process.poll() is not None:
            return
        try:
            ask(url + "/health")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
        else:
            return


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    """Address, trace and log of a running server."""
    folder = tmp_path_factory.mktemp("http")
    url = f"http://127.0.0.1:{free_port()}"
    config = {"top_k": 2, "summary_dtype": "fp8_e4m3", "trace": str(folder / "trace.jsonl")}
    command = [*SERVE, "--model-path", str(tiny_model), "--flow", FLOW, "--flow-config", json.dumps(config)]
    command += ["--enable-metrics", "--decode-log-interval", "2"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--port", url.rsplit(":", 1)[1]],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=cpu_environment(),
            start_new_session=True,
        )
        try:
            wait_until_healthy(url, process)
            assert process.poll() is None, (folder / "log").read_text()[-4000:]
            yield url, folder / "trace.jsonl", folder / "log"
        finally:
            kill_group(process)
            process.wait(timeout=30)


def test_it_answers_and_decodes_sparsely(server, prompts):
    url, trace, _ = server
    before = len(read_trace(trace))
    body = {"input_ids": prompts[0], "sampling_params": {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}}
    answer = ask(url + "/generate", body)
    assert len(answer["output_ids"]) == 5
    lines = read_trace(trace)[before:][:4]  # the overlap schedule runs one more
    assert [line["seq_lens"] for line in lines] == [[301], [302], [303], [304]]
    assert [line["cached"] for line in lines] == [[19]] * 4
    assert all(layer["attended"] == [[4, 4]] for line in lines for layer in line["layers"].values())


def test_it_tells_its_flow(server):
    url, _, _ = server
    info = ask(url + "/server_info")
    assert info["flow"] == FLOW
    assert json.loads(info["flow_config"])["top_k"] == 2
    assert info["decode_attention_backend"] == "flowlib"
    assert info["page_size"] == 16
    served = info["flow_served"]
    assert served["budget"] == {"top_k": 2, "top_k_ratio": 0.0, "bos": 1, "eos": 1, "dense_below": 0, "page_size": 16}
    assert (served["flow"], served["options"], served["impl"]) == (FLOW, {}, "reference")
    assert (served["sparse_layers"], served["dense_layers"], served["sparse_above_tokens"]) == (2, [], 64)
    assert served["fields"] == {name: [1, 64, "float8_e4m3fn"] for name in ("k_max", "k_min")}


def counts(url):
    """flowlib's metrics by name, and the labels of one of them."""
    with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found = re.findall(r"^flowlib:(\w+)_total\{(.*)\} (\S+)$", text, re.MULTILINE)
    return {name: int(float(value)) for name, _, value in found}, found[0][1] if found else ""


def test_metrics_equal_the_trace(server, prompts):
    """An idle scheduler publishes what it counted; the trace, written by the step itself, tells what that must be."""
    url, trace, _ = server
    body = {
        "input_ids": [prompts[1], prompts[0][:45]],
        "sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
    }
    ask(url + "/generate", body)
    for _ in range(40):
        time.sleep(0.25)
        wanted = dict.fromkeys(("pages_attended", "pages_cached", "dense_steps", "sparse_steps", "saturated_bounds"), 0)
        for line in read_trace(trace):
            rows = [[layer["attended"][i] for layer in line["layers"].values()] for i in range(len(line["cached"]))]
            for row, pages in zip(rows, line["cached"], strict=True):
                wanted["pages_attended"] += sum(map(sum, row))
                wanted["pages_cached"] += pages * sum(map(len, row))
                dense = sum(map(sum, row)) == pages * sum(map(len, row))
                wanted["dense_steps" if dense else "sparse_steps"] += 1
        found, labels = counts(url)
        if found == wanted:
            break
    assert found == wanted
    assert min(found["dense_steps"], found["sparse_steps"]) > 3
    assert f'flow="{FLOW}"' in labels
    assert 'tp_rank="0"' in labels


def test_the_log_says_what_is_served(server):
    _, _, log = server
    text = log.read_text()
    assert f"flowlib: --flow {FLOW} sets --decode-attention-backend to flowlib" in text
    assert f"flowlib: --page-size is not given, --flow {FLOW} sets it to 16" in text
    # two layers, 2 kv heads, k_max and k_min of 64 float8 each, a 16th of it per token
    nbytes = 2 * 2 * 2 * 64 // 16
    first, second = [line for line in text.splitlines() if "flowlib: flow " in line or "flowlib: budget " in line]
    assert first.endswith(
        f"flowlib: flow {FLOW} (options none), impl reference, 2 sparse and 0 dense layers, "
        f"fields k_max float8_e4m3fn, k_min float8_e4m3fn add {nbytes} bytes per token"
    )
    assert second.endswith(
        "flowlib: budget top_k 2, top_k_ratio 0, bos 1, eos 1 (pages of 16 tokens), dense_below 0: "
        "requests of more than 64 tokens leave pages out"
    )

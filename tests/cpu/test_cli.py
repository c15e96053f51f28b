"""The command line: what it prints, its exit statuses, and that a mistake is one line."""

import os
import re
import subprocess
import sys
import textwrap

import pytest
from typer.testing import CliRunner

import flowlib
from flowlib.cli import app
from flowlib.cli.options import parse_options
from flowlib.core import registry
from flowlib.runtime import reference
from tests.processes import ROOT, python

SMALL = ("--num-kv-heads", "1", "--head-dim", "16", "--page-size", "2", "--max-pages", "20", "--top-k", "2")

FLOW_FILE = """
import flowlib
from flowlib.ops import CMean, GeMV, topK

@flowlib.register("mine", "my_alias")
class Mine(flowlib.vFlow):
    \"\"\"The flow of this file.\"\"\"

    def __init__(self, top: int = 1):
        self.cmean, self.gemv, self.topk = CMean(dim=1), GeMV(), topK()

    def create_cache(self, page_size, head_dim):
        return {"centroid": (1, head_dim)}

    def forward_cache(self, cache, loc, ctx):
        self.cmean(cache["k"], cache["centroid"], loc=loc, ctx=ctx)

    def forward_indexer(self, q, o, cache, ctx):
        self.topk(self.gemv(q.mean(dim=1, keepdim=True), cache["centroid"], ctx=ctx), o, ctx=ctx)
"""

NO_TRITON = """
import sys
sys.modules["triton"] = None
from flowlib.cli import app
for line in sys.argv[1:]:
    app(line.split(), standalone_mode=False)
"""


@pytest.fixture(autouse=True)
def registry_as_it_was(monkeypatch):
    flowlib.list_flows()  # loads the built-in flows
    monkeypatch.setattr(registry, "_FLOWS", dict(registry._FLOWS))
    monkeypatch.setattr(registry, "_ALIASES", dict(registry._ALIASES))


@pytest.fixture
def flow_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(FLOW_FILE))
    return str(path)


def call(*arguments: object, status: int = 0):
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == status, done.output
    return done


def refused(*arguments: object) -> str:
    """The one line that a wrong call prints."""
    done = call(*arguments, status=2)
    lines = done.stderr.strip().splitlines()
    assert done.stdout == ""
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0].removeprefix("error: ")


def test_list_shows_every_flow():
    text = call("list").stdout
    for name in flowlib.list_flows():
        line = next(line for line in text.splitlines() if line.startswith(f"{name} "))
        assert str(registry.find(name).default_page_size) in line.split()
        assert all(alias in line for alias in registry.aliases_of(name))
    assert "k_max [1, 128], k_min [1, 128]" in text
    assert "hh_score [1, 1] (state)" in text


def test_list_shows_the_flows_of_a_file(flow_file):
    line = next(line for line in call("list", "--flow-file", flow_file).stdout.splitlines() if line.startswith("mine"))
    assert line.split()[1:4] == ["my_alias", "16", "centroid"]
    assert line.rstrip().endswith("The flow of this file.")


def test_profile_prints_the_plan_for_the_numbers_given():
    text = call("profile", "quest", "--group-size", 3, "--head-dim", 80, "--kv-dtype", "fp32", "--top-k", 5).stdout
    spec = flowlib.Spec(group_size=3, head_dim=80, kv_dtype=flowlib.core.spec.torch.float32, top_k=5)
    assert text.rstrip("\n") == str(flowlib.profile(flowlib.build("quest"), spec))


def test_profile_prints_the_floor_of_each_stage():
    numbers = ["--num-kv-heads", 8, "--head-dim", 128, "--max-batch", 16, "--max-pages", 2048, "--top-k", 128]
    text = call("profile", "quest", *numbers, "--bandwidth", 4.54).stdout
    score = 16 * 8 * 2048 * (2 * 128 * 2 + 4) / 4.54e6
    attend = 16 * 8 * 130 * 16 * 2 * 128 * 2 / 4.54e6
    assert f"{score:.2f}  generated" in text
    assert f"{attend:.2f}  flowlib.kernels.attend" in text
    assert "floor us" not in call("profile", "quest", *numbers).stdout


def test_profile_refuses_state_beside_a_prefix_cache():
    assert "hh_score" in call("profile", "h2o_token").stdout
    refused = call("profile", "h2o_token", "--prefix-cache", status=2)
    assert "keeps state per request in 'hh_score'" in refused.stderr
    assert "add --disable-radix-cache" in refused.stderr
    assert "centroid" in call("profile", "block_sparse", "--prefix-cache").stdout


def test_a_dtype_is_given_by_its_name():
    text = call("profile", "h2o_token", "--option", "state_dtype=float32").stdout
    assert re.search(r"hh_score +state +\[1, 1\] +float32", text)
    said = refused("profile", "h2o_token", "--option", "state_dtype=float31")
    assert "dtype of field 'hh_score' is 'float31', expected one of float32, bfloat16" in said


def test_profile_takes_the_page_size_of_the_flow():
    assert "page_size 1," in call("profile", "h2o_token").stdout
    assert "page_size 64," in call("profile", "lserve_sparse_attention").stdout


def test_options_reach_the_flow():
    assert call("profile", "twilight", "--option", "logits=centroid").stdout.count("centroid") >= 1
    assert parse_options(["p=0.9", "k=null", "on=true", "name=quest", 'text="1"', "ab=1=2"]) == {
        "p": 0.9, "k": None, "on": True, "name": "quest", "text": "1", "ab": "1=2",
    }  # fmt: skip


def test_kernels_prints_the_source_that_runs():
    done = call("kernels", "block_sparse_attention", "--head-dim", 64)
    plan = flowlib.profile(flowlib.build("block_sparse_attention"), flowlib.Spec(head_dim=64))
    assert done.stdout.rstrip("\n") == plan.program.source.rstrip("\n")
    path = done.stderr.strip()
    assert path == call("kernels", "block_sparse_attention", "--head-dim", 64, "--path").stdout.strip()
    with open(path) as file:
        assert file.read() == plan.program.source


def test_kernels_of_a_users_flow(flow_file):
    assert "@triton.jit" in call("kernels", "my_alias", "--flow-file", flow_file).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("profile", "qest"), "unknown flow 'qest'. Did you mean 'quest'?"),
        (("kernels", "quest", "--page-size", 200), "Spec: page_size is 200, expected an integer from 1 to 128"),
        (("profile", "quest", "--kv-dtype", "bfloat15"), "--kv-dtype is 'bfloat15', expected one of bfloat16, float16"),
        (("profile", "quest", "--option", "scale"), "--option is 'scale', expected KEY=VALUE, such as scale=0.1"),
        (("profile", "block_sparse", "--option", "scal=1"), "flow 'block_sparse' has no option 'scal'"),
        (("profile", "h2o_token", "--page-size", 16), "h2o_token_sparse_attention: page_size is 16, expected 1"),
        (("list", "--flow-file", "none.py"), "flow file 'none.py' does not exist"),
        (("verify",), "verify: no flow is named: give FLOW, --all, or a --flow-file that registers one"),
        (("verify", "quest", "qest"), "unknown flow 'qest'. Did you mean 'quest'?"),
        (("verify", "quest", "--impl", "refrence"), "--impl is 'refrence', expected 'reference' or 'triton'"),
        (("verify", "quest", "--device", "tpu"), "--device is 'tpu', expected 'cpu' or 'cuda'"),
    ],
)
def test_a_mistake_is_one_line(arguments, said):
    assert said in refused(*arguments)


def test_cuda_that_is_not_there(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = "--device is 'cuda', but torch finds no CUDA device here; use --device cpu"
    assert refused("verify", "quest", "--device", "cuda") == said


def test_kernels_are_not_interpreted_on_a_gpu_by_accident(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert refused("verify", "quest").startswith("TRITON_INTERPRET is set, so kernels would be interpreted")


def test_a_cache_directory_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLOWLIB_CACHE_DIR", str(tmp_path / "file"))
    assert "set FLOWLIB_CACHE_DIR to a directory that can be written" in refused("kernels", "quest")


def test_verify_prints_oracle_reference_and_triton():
    done = call("verify", "block_sparse_attention", "--device", "cpu", *SMALL)
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["block_sparse_attention", "oracle:", "independent"]
    heads = ["stage", "oracle", "max", "reference", "error", "tolerance", "triton", "error", "tolerance"]
    assert lines[1].split() == heads
    stages = {line[:14].strip(): line.split()[-5:] for line in lines[2:7]}
    assert set(stages) == {"field centroid", "scores", "selection", "attention o", "attention lse"}
    for reference_error, reference_tolerance, triton_error, triton_tolerance, verdict in stages.values():
        assert float(reference_error) <= float(reference_tolerance)
        assert float(triton_error) <= float(triton_tolerance)
        assert verdict == "ok"
    assert "pages attended" in lines[7]
    assert not lines[7].split("attended, ")[1].startswith("0 skipped")


def test_verify_fails_with_status_1_and_says_where(monkeypatch):
    original = reference.attend

    def in_base_2(*arguments):
        o, lse = original(*arguments)
        return o, lse / 0.6931471805599453

    monkeypatch.setattr(reference, "attend", in_base_2)
    text = call("verify", "streaming", "quest", "--impl", "reference", "--device", "cpu", *SMALL, status=1).stdout
    assert any(line.startswith("attention lse") and line.endswith("FAILED") for line in text.splitlines())
    assert "FAILED reference, attention lse, " in text
    assert "tolerance" in text
    assert text.splitlines()[-1] == "0 of 2 flows are right"


def test_verify_takes_the_flows_of_a_file(flow_file):
    text = call("verify", "--flow-file", flow_file, "--impl", "reference", "--device", "cpu", *SMALL).stdout
    assert text.splitlines()[0].split() == ["mine", "oracle:", "own", "reference"]


def test_verify_all_takes_every_flow(monkeypatch):
    monkeypatch.setattr(registry, "_FLOWS", {n: f for n, f in registry._FLOWS.items() if "block_sparse" in n})
    text = call("verify", "--all", "--impl", "reference", "--device", "cpu", *SMALL).stdout
    names = flowlib.list_flows(mla=False)
    assert len(names) < len(registry._FLOWS), "SMALL is a size of K and V"
    assert text.splitlines()[-1] == f"{len(names)} of {len(names)} flows are right"


# -- in a process of its own


def run(*arguments: str, status: int) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "flowlib", *arguments], capture_output=True, text=True, env=env)
    assert done.returncode == status, done.stderr
    return done


def test_verify_asks_for_the_interpreter_itself():
    done = run("verify", "quest", "--device", "cpu", *SMALL, status=0)
    assert done.stderr.strip() == "On the CPU: TRITON_INTERPRET=1 is set, so that Triton interprets its kernels."
    assert done.stdout.splitlines()[0].startswith("gqa_quest_sparse_attention")


def test_a_flow_file_that_is_broken(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import flowlib\nfrom flowlib.ops import topKK\n")
    done = run("verify", "mine", "--flow-file", str(path), status=2)
    assert "Traceback" not in done.stderr
    assert f"error: flow file '{path}' failed to import: ImportError: cannot import name 'topKK'" in done.stderr
    assert "(broken.py:2: from flowlib.ops import topKK)" in done.stderr


def test_what_needs_no_triton_runs_without_it():
    verify = ["verify", "twilight", "--impl", "reference", "--device", "cpu", *SMALL]
    text = python("-c", NO_TRITON, "list", "profile quest", "kernels quest", " ".join(verify))
    assert "gqa_quest_sparse_attention " in text
    assert "at most 10 of 256 pages attended" in text
    assert "@triton.jit" in text
    assert "twilight_attention   oracle: independent" in text
    assert "FAILED" not in text


def test_version():
    assert call("--version").stdout.strip() == flowlib.__version__

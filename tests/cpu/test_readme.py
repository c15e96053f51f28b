"""What the README shows is what happens: its flow runs, its commands exist."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

import flowlib

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PAGE, HEADS, GROUP, DIM, PAGES = 16, 2, 3, 64, 11


@pytest.fixture
def readme_flow(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    (source,) = [block for block in blocks if "@register" in block]
    path = tmp_path / "my_flow.py"
    path.write_text(source)
    return flowlib.build("loudest_head_attention", module_path=path)


def test_readme_is_short_and_names_both_commands():
    assert len(README.splitlines()) <= 110
    commands = re.findall(r"^make \w+$", README, flags=re.MULTILINE)
    assert commands == ["make demo", "make test"]
    for command in commands:
        subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


def test_ci_runs_the_readme_test_command():
    assert re.search(r"^make test\b", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE)


def test_the_table_of_flows_is_the_registry():
    table = README[README.index("## Flows") : README.index("## Status")]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == [name for name in flowlib.list_flows() if name != "loudest_head_attention"]


def test_readme_flow_selects_what_its_docstring_says(readme_flow):
    sizes = {"page_size": PAGE, "head_dim": DIM, "group_size": GROUP, "num_kv_heads": HEADS}
    spec = flowlib.Spec(**sizes, kv_dtype=torch.float32, top_k=3)
    plan = flowlib.profile(readme_flow, spec)
    pool = flowlib.PagedPool(plan, num_pages=PAGES, device="cpu")
    g = torch.Generator().manual_seed(0)
    n = PAGES * PAGE - 5
    k, v = (torch.randn(n, HEADS, DIM, generator=g) for _ in range(2))
    pool.write(k, v, torch.arange(n))
    q = torch.randn(1, HEADS * GROUP, DIM, generator=g)
    batch = flowlib.Batch(torch.arange(PAGES, dtype=torch.int32)[None], torch.tensor([n], dtype=torch.int32))
    chosen = plan.step(q, pool, batch, dtype=torch.float64).pages[0]
    for head in range(HEADS):
        heads = q[0, head * GROUP : (head + 1) * GROUP].double()
        means = [k[PAGE * page : PAGE * (page + 1), head].double().mean(0) for page in range(1, PAGES - 1)]
        scores = torch.stack([(heads @ mean).max() for mean in means])
        expected = {0, PAGES - 1, *(1 + scores.topk(3).indices).tolist()}
        assert set(chosen[head].tolist()) - {-1} == expected

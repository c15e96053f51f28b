"""The versions of SGLang, and a tiny model with random weights, made once per session."""

import json
import sys

import pytest
import torch

from tests.sglang.engine import HERE, run
from tests.sglang.versions import VERSIONS

VOCAB = 512


@pytest.fixture(scope="session", params=VERSIONS, ids=lambda sglang: sglang.version)
def sglang(request):
    """Each version of SGLang that the plugin knows."""
    request.param.check()
    return request.param


@pytest.fixture(scope="session")
def objects(sglang):
    """What ``pool_job`` and ``graph_job`` say, from one process: SGLang takes seconds to import."""
    command = [sys.executable, "-m", "tests.sglang.objects_job"]
    ended = run(command, timeout=200, env=sglang.environment(), cwd=HERE.parent.parent)
    assert ended.code == 0, ended.text[-4000:]
    return json.loads(ended.text.split("ANSWER ", 1)[1].splitlines()[0])


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Folder of a Qwen3-shaped model in float32: 2 layers, 6 query and 2 kv heads of 64."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("tiny-qwen3")
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=192,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = Qwen3ForCausalLM(config).float()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def prompts():
    """Eight prompts of 300 to 1,300 tokens; pairs of them share their first 200 tokens."""
    generator = torch.Generator().manual_seed(3)
    lengths = [300, 415, 530, 700, 850, 1000, 1151, 1300]
    heads = [torch.randint(3, VOCAB, (200,), generator=generator).tolist() for _ in range(4)]
    tails = [torch.randint(3, VOCAB, (n - 200,), generator=generator).tolist() for n in lengths]
    return [heads[i // 2] + tail for i, tail in enumerate(tails)]

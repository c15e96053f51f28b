"""The switch that selects the platform, and the environment variables of a process that runs on it."""

import os
from collections.abc import Mapping
from pathlib import Path

PLATFORM_NAME = "flowlib_cpu_host"
"""The entry point's name, and the value of `SGLANG_PLATFORM` that selects this host."""

_PLATFORM_CLASS = "flowlib_cpu_host.platform.CpuHostPlatform"


def activate() -> str | None:
    """Names the platform class when `SGLANG_PLATFORM` selects this host, else None.

    SGLang activates every installed platform when the variable is unset, so being installed must not be enough.
    """
    return _PLATFORM_CLASS if os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME else None


def stub_path() -> Path:
    """The folder that holds the torchvision stand-in, to be put in front of `PYTHONPATH`."""
    return Path(__file__).resolve().parent / "stubs"


def cpu_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a child process in which stock SGLang runs on the CPU.

    Args:
        base: variables to start from; `os.environ` when None. It is not changed.

    Returns:
        A copy of `base` with these set: `SGLANG_PLATFORM` selects this host; `PYTHONPATH` starts with the torchvision
        stand-in (by path, since SGLang's own child processes import torchvision before they load any plugin);
        `CUDA_VISIBLE_DEVICES` and `HIP_VISIBLE_DEVICES` hide GPUs, whose kernels SGLang would choose;
        `TRITON_INTERPRET=1` lets SGLang's page allocator run its Triton kernels on CPU tensors;
        `HF_HUB_OFFLINE` and `TRANSFORMERS_OFFLINE` keep the tokenizer from asking a model hub.

    A running process can't take these on: the stand-in must be found, and the interpreter chosen, before the imports.
    """
    env = dict(os.environ if base is None else base)
    others = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(stub_path())]
    env["PYTHONPATH"] = os.pathsep.join([str(stub_path()), *others])
    env["SGLANG_PLATFORM"] = PLATFORM_NAME
    env["TRITON_INTERPRET"] = "1"
    env["CUDA_VISIBLE_DEVICES"] = env["HIP_VISIBLE_DEVICES"] = ""
    env["HF_HUB_OFFLINE"] = "1"
    env["TRANSFORMERS_OFFLINE"] = "1"
    env["TOKENIZERS_PARALLELISM"] = "false"
    return env

"""A host on which stock SGLang runs without a GPU and without vendor kernels.

The package offers the SGLang platform (`activate`, found through the entry-point group `sglang.srt.platforms`),
the environment a process needs to run on it (`cpu_environment`) and a small real model (`smollm2.ensure_model`).
Nothing here imports torch or SGLang until SGLang asks for the platform class.
"""

from flowlib_cpu_host.environment import PLATFORM_NAME, activate, cpu_environment, stub_path

__all__ = ["PLATFORM_NAME", "activate", "cpu_environment", "stub_path"]

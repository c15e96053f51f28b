"""What holds for every test: fresh memory is poisoned, and generated kernels go into a folder of the session."""

import functools

import pytest
import torch

pytest.register_assert_rewrite("tests.suites")

_ALLOCATORS = [
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
]


def pytest_addoption(parser, pluginmanager):
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "read by pytest-timeout; without it the tests run unlimited")
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden anew from what the compiler generates now"
    )


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory):
    """A kernel cache of this session (of this worker, with xdist): no test depends on what an earlier run left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOWLIB_CACHE_DIR", str(tmp_path_factory.mktemp("flowlib-cache")))
        yield


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fresh memory holds NaN, or the largest integer, so that whatever is read unwritten shows."""
    for owner, name in _ALLOCATORS:
        monkeypatch.setattr(owner, name, _poisoning(getattr(owner, name)))


def _poisoning(allocate):
    @functools.wraps(allocate)
    def allocate_poisoned(*args, **kwargs):
        fresh = allocate(*args, **kwargs)
        if isinstance(fresh, torch.Tensor) and fresh.device.type != "meta":
            with torch.no_grad():
                if fresh.is_floating_point():
                    fresh.fill_(float("nan"))
                elif fresh.dtype in (torch.int32, torch.int64):
                    fresh.fill_(torch.iinfo(fresh.dtype).max)
        return fresh

    return allocate_poisoned


def pytest_make_parametrize_id(config, val, argname):
    """Readable ids: ``bfloat16``, not ``val0``."""
    return str(val).removeprefix("torch.") if isinstance(val, torch.dtype) else None

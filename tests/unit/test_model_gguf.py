"""A GGUF's quantized matrices stay integers and stand for gguf's own values, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize
from safetensors.numpy import load_file, save_file

from headrace.errors import StartupError
from kernels.ops import Program, StepRows
from kernels.weights import pack
from tests.gguf_fixtures import random_rows, tiny_gguf
from tests.model_fixtures import plan_of, tiny_model, watch_logits
from workers.model.gguf_codes import layout_of, unpack
from workers.model.loaders import CODES, Weights
from workers.model.prepare import check_folder, prepare_model
from workers.model.weight_format import WeightFormat
from workers.runner.torch_runner import TorchRunner

CODED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def _mixed(name: str) -> str:
    """Every fused pair of matrices in different types, as the mixed recipes of llama.cpp have them, and more so."""
    layer = int(name.split(".")[2]) if "layers" in name else 0
    kinds: dict[str, list[str]] = {
        "q_proj": ["Q4_K", "Q6_K", "F16", "Q4_0"],
        "k_proj": ["Q6_K", "Q8_0", "F16", "Q4_1"],
        "v_proj": ["Q5_K", "Q3_K", "F16", "Q2_K"],
        "o_proj": ["Q3_K", "IQ4_NL", "BF16", "Q5_0"],
        "gate_proj": ["Q4_K", "Q8_0", "BF16", "F16"],
        "up_proj": ["Q2_K", "F32", "F16", "Q5_1"],
        "down_proj": ["Q6_K", "Q4_0", "F32", "Q4_K"],
        "embed_tokens": ["Q6_K"],
        "lm_head": ["Q8_0"],
    }
    return kinds[name.split(".")[-2]][layer]


def _model(folder: Path, tied: bool = True) -> Path:
    return tiny_model(folder, hidden=256, intermediate=512, heads=4, kv_heads=2, head_dim=64, tied=tied)


def _bits(values: object) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).view(np.int32)


@pytest.mark.parametrize("kind", CODED)
def test_codes_stand_for_the_same_bits_as_ggufs_own_values(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(CODED.index(kind))
    layout = layout_of(kind)
    assert layout is not None
    # 1. Scales from the least float16 to large ones: rounding would show somewhere.
    data = np.concatenate([random_rows(kind, 40, 512, rng, scale) for scale in (1e-7, 1e-5, 1e-3, 1.0, 500.0)])
    wanted = dequantize(data, GGMLQuantizationType[kind])
    codes = unpack(data, layout)
    assert codes.codes.dtype == np.int8 and codes.codes.min() >= (0 if layout.bits == 4 else -128)
    assert layout.bits == 8 or codes.codes.max() <= 15
    assert np.array_equal(codes.values(), wanted)
    if kind != "Q4_0":  # whose negative zeros become zeros
        assert np.array_equal(_bits(codes.values()), _bits(wanted))

    # 2. Through the file, as float32 of `Codes.values` and as the kernels see them.
    model = _model(tmp_path)
    tiny_gguf(model, tmp_path / "m.gguf", lambda name: kind)
    weights = Weights(prepare_model(str(tmp_path / "m.gguf"), tmp_path / "cache"))
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"):
        shape = weights.entries[name].shape
        loaded = weights.codes(name, *shape)
        assert loaded is not None and (loaded.bits, loaded.group) == (layout.bits, layout.group)
        plain = weights.get(name, *shape).numpy()
        assert np.array_equal(_bits(loaded.values().numpy()), _bits(plain))
        program, out = Program(1), torch.empty(shape)
        program.embed(pack([loaded]), out)
        program.run(StepRows(shape[0], np.arange(shape[0])))
        assert np.array_equal(_bits(out.numpy()), _bits(plain))


def test_types_without_an_exact_form_have_no_codes() -> None:
    for kind in ("F32", "F16", "BF16", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "Q8_K"):
        assert layout_of(kind) is None


TYPES: dict[str, Callable[[str], str]] = {
    "mixed": _mixed,
    "Q4_0": lambda _: "Q4_0",
    "Q2_K": lambda _: "Q2_K",
    "F16": lambda _: "F16",
    "BF16": lambda _: "BF16",
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("types", TYPES)
def test_a_converted_file_gives_the_same_logits_as_integers_and_as_float32(
    types: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 1. The folder has the values of the GGUF, with the rows of Q and K put back.
    values = tiny_gguf(_model(tmp_path, tied), tmp_path / "m.gguf", TYPES[types])
    folder = prepare_model(str(tmp_path / "m.gguf"), tmp_path / "cache")
    weights = Weights(folder)
    assert sorted(weights.entries) == sorted(values)
    for name, wanted in values.items():
        assert np.array_equal(weights.get(name, *wanted.shape).numpy(), wanted)

    # 2. One chunk, other chunks and single tokens: the same bits under both formats.
    logits_of_steps = watch_logits(monkeypatch)
    ids = np.random.default_rng(1).integers(0, 512, 70).tolist()
    sizes = []
    for weight_format in (WeightFormat.FLOAT32, WeightFormat.AUTO):
        runner = TorchRunner(folder, 128, num_blocks=8, threads=2, exact=True, weight_format=weight_format)
        sizes.append(runner.memory_plan()["weights"])
        done = 0
        for chunk in (40, 1, 27, 1, 1):
            runner.run(plan_of([(done, ids[done : done + chunk], [4, 1, 0, 3, 2])]))
            done += chunk
    assert np.isfinite(logits_of_steps).all() and len(logits_of_steps) == 10
    assert np.array_equal(_bits(logits_of_steps[:5]), _bits(logits_of_steps[5:]))
    assert sizes[1] < (0.75 if types == "mixed" else 0.6) * sizes[0]
    estimate = WeightFormat.AUTO.bytes_of(weights)
    assert 0.5 * sizes[1] < estimate < 1.2 * sizes[1]


def test_transformers_reads_a_converted_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    tiny_gguf(_model(tmp_path, tied=False), tmp_path / "m.gguf", _mixed)
    folder = prepare_model(str(tmp_path / "m.gguf"), tmp_path / "cache")
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
    ids = np.random.default_rng(1).integers(0, 512, 50).tolist()
    with torch.no_grad():
        wanted = reference(torch.tensor([ids])).logits[0, -1].numpy()
    logits_of_steps = watch_logits(monkeypatch)
    TorchRunner(folder, 128, num_blocks=8, threads=2).run(plan_of([(0, ids, [0, 1, 2, 3])]))
    assert np.abs(logits_of_steps[-1] - wanted).max() < 1e-4


def _rewrite_header(folder: Path, change: Callable[[dict], object]) -> None:
    path = folder / CODES
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


NAME = "model.layers.0.mlp.up_proj.weight"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda f: (f / CODES).write_bytes((f / CODES).read_bytes()[:-9]), "headrace.codes: truncated"),
    "empty": (lambda f: (f / CODES).write_bytes(b""), "headrace.codes: not a safetensors file"),
    "noise": (lambda f: (f / CODES).write_bytes(b"\x10" + b"\0" * 7 + b"x" * 900), "corrupt"),
    "no scales": (lambda f: _rewrite_header(f, lambda h: h.pop(f"{NAME}.scales")), "not whole"),
    "no codes": (lambda f: _rewrite_header(f, lambda h: h.pop(f"{NAME}.codes")), "not whole"),
    "no offsets": (lambda f: _rewrite_header(f, lambda h: h.pop(f"{NAME}.offsets")), "not whole"),
    "other shape": (lambda f: _rewrite_header(f, lambda h: h[f"{NAME}.codes"].update(shape=[256, 256])), "do not fit"),
    "other scales": (
        lambda f: _rewrite_header(f, lambda h: h[f"{NAME}.scales"].update(shape=[1024, 4])),
        "do not fit",
    ),
    "flat": (lambda f: _rewrite_header(f, lambda h: h[f"{NAME}.codes"].update(shape=[512 * 128])), "do not fit"),
    "half scales": (
        lambda f: _rewrite_header(f, lambda h: h[f"{NAME}.scales"].update(dtype="F16", shape=[512, 16])),
        "do not fit",
    ),
    "wrong size": (lambda f: _rewrite_header(f, lambda h: h[f"{NAME}.codes"].update(dtype="F32")), "number of bytes"),
    "not numbers": (lambda f: _rewrite_header(f, lambda h: h[f"{NAME}.codes"].update(shape=["a", 2])), "corrupt"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_codes_give_one_clear_line(name: str, tmp_path: Path) -> None:
    tiny_gguf(_model(tmp_path), tmp_path / "m.gguf", lambda _: "Q4_1")
    folder = prepare_model(str(tmp_path / "m.gguf"), tmp_path / "cache")
    damage, message = BROKEN[name]
    damage(folder)
    for use in (check_folder, lambda f: TorchRunner(f, 64, num_blocks=4)):
        with pytest.raises(StartupError, match=message) as caught:
            use(folder)
        assert "\n" not in str(caught.value)


def test_without_its_codes_a_folder_is_served_from_its_float32_values(tmp_path: Path) -> None:
    tiny_gguf(_model(tmp_path), tmp_path / "m.gguf", lambda _: "Q8_0")
    folder = prepare_model(str(tmp_path / "m.gguf"), tmp_path / "cache")
    assert TorchRunner(folder, 64, num_blocks=4).weight_storage == "int8"
    (folder / CODES).unlink()
    assert TorchRunner(folder, 64, num_blocks=4).weight_storage == "float32"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(NAME), r"tensor 'blk.0.ffn_up.weight' is missing"),
        (
            lambda tensors: tensors.update({NAME: tensors[NAME][:256]}),
            r"up_proj.weight' has shape \(256, 256\), expected \(512, 256\)",
        ),
    ],
)
def test_a_gguf_with_other_tensors_than_its_metadata_promises_is_refused(
    change: Callable[[dict], object], message: str, tmp_path: Path
) -> None:
    model = _model(tmp_path)
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors")
    tiny_gguf(model, tmp_path / "m.gguf", lambda _: "Q8_0")
    with pytest.raises(StartupError, match=message):
        prepare_model(str(tmp_path / "m.gguf"), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("models/*/"))

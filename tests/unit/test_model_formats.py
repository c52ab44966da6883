"""How weights are kept: what is lossless gives the same bits, what is not stays close and has another identity."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.errors import StartupError
from kernels.weights import Codes, Storage, pack
from tests.model_fixtures import plan_of, tiny_model, watch_logits
from workers.model.loaders import Weights
from workers.model.matrices import storage_text, unified
from workers.model.weight_format import WeightFormat
from workers.runner import torch_runner
from workers.runner.torch_runner import TorchRunner


def _codes(group: int, bits: int = 8, shifted: bool = False, depth: int = 192) -> Codes:
    low, high = (0, 16) if bits == 4 else (-128, 128)
    tables = torch.randn(2, 32, depth // group).half().float() * 0.1
    return Codes(
        torch.randint(low, high, (32, depth), dtype=torch.int8), tables[0], tables[1] if shifted else None, group, bits
    )


def _values(part: Tensor | Codes) -> Tensor:
    return (part.values() if isinstance(part, Codes) else part.float()).view(torch.int32)


BFLOAT16 = torch.randn(32, 192).bfloat16()
HALF = torch.randn(32, 192).half()
MIXES: dict[str, tuple[list[Tensor | Codes], str, int]] = {
    "one kind": ([_codes(32, 4, True), _codes(32, 4, True)], "INT4_SHIFTED", 32),
    "4 bits, two groups": ([_codes(32, 4, True), _codes(16, 4, True)], "INT4_SHIFTED", 16),
    "4 and 8 bits": ([_codes(32, 4, True), _codes(16), _codes(32, 8, True)], "INT8_SHIFTED", 16),
    "8 bits, two groups": ([_codes(32), _codes(48)], "INT8", 16),
    "with and without offsets": ([_codes(32), _codes(32, 8, True)], "INT8_SHIFTED", 32),
    "one group a row": ([_codes(192), _codes(64)], "INT8", 64),
    "one half dtype": ([HALF, HALF], "FLOAT16", 0),
    "bfloat16": ([BFLOAT16], "BFLOAT16", 0),
    "two half dtypes": ([HALF, BFLOAT16], "FLOAT32", 0),
    "a half and float32": ([HALF, HALF.float()], "FLOAT32", 0),
    "codes and a half": ([_codes(32, 4, True), HALF], "FLOAT32", 0),
    "codes and float32": ([HALF.float(), _codes(32)], "FLOAT32", 0),
}


@pytest.mark.parametrize("name", MIXES)
def test_matrices_that_are_fused_are_kept_in_one_way_and_keep_every_bit(name: str) -> None:
    parts, storage, group = MIXES[name]
    # A negative zero is the bit that a zero offset would lose.
    for part in parts:
        if isinstance(part, Codes) and part.offsets is None:
            part.codes[:, ::3] = 0
    made = unified(parts)
    for before, after in zip(parts, made, strict=True):
        assert torch.equal(_values(before), _values(after))
    if isinstance(made[0], Codes):
        packed = pack(made)
        assert (packed.storage, packed.group) == (Storage[storage], group)
        assert all(part.offsets is not None for part in made if storage != "INT8")  # type: ignore[union-attr]
    else:
        assert {str(part.dtype) for part in made} == {f"torch.{storage.lower()}"}  # type: ignore[union-attr]


def test_storages_have_names_for_people() -> None:
    assert storage_text([Storage.INT4_SHIFTED, Storage.INT8, Storage.INT8_SHIFTED]) == "int4 and int8"
    assert storage_text([Storage.BFLOAT16]) == "bfloat16"


def _logits(folder: Path, weight_format: WeightFormat, seen: list[np.ndarray]) -> tuple[TorchRunner, np.ndarray]:
    """The runner, and its logits after a prefill and a decode step [2, vocab]."""
    ids = np.random.default_rng(1).integers(0, 512, 60).tolist()
    runner = TorchRunner(folder, 128, num_blocks=8, threads=2, exact=True, weight_format=weight_format)
    for start, stop in ((0, 59), (59, 60)):
        runner.run(plan_of([(start, ids[start:stop], [4, 1, 0, 3])]))
    return runner, np.stack(seen[-2:])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_lossy_formats_stay_close_are_smaller_and_have_their_own_identity(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_logits(monkeypatch)
    folder = tiny_model(tmp_path, family, hidden=128, intermediate=256, tied=family == "llama")
    exact, wanted = _logits(folder, WeightFormat.FLOAT32, seen)
    auto, same = _logits(folder, WeightFormat.AUTO, seen)
    assert np.array_equal(same, wanted)
    assert auto.fingerprint() == exact.fingerprint()
    assert exact.weight_storage == auto.weight_storage == "float32"

    fingerprints = {exact.fingerprint()}
    # bounds: largest difference of a logit over the standard deviation of the logits; bytes over those of float32
    for name, bound, share in (("float16", 0.01, 0.5), ("bfloat16", 0.08, 0.5), ("int8", 0.15, 0.3)):
        runner, logits = _logits(folder, WeightFormat(name), seen)
        error = np.abs(logits - wanted).max() / wanted.std()
        assert 0 < error < bound
        assert runner.memory_plan()["weights"] <= share * exact.memory_plan()["weights"]
        assert runner.weight_storage == name
        assert runner.identity_fields()["quantization"] == name
        fingerprints.add(runner.fingerprint())
    assert len(fingerprints) == 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_checkpoints_stay_half_and_keep_every_bit(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_logits(monkeypatch)
    folder = tiny_model(tmp_path, "qwen3")
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    wide, wanted = _logits(folder, WeightFormat.FLOAT32, seen)
    auto, logits = _logits(folder, WeightFormat.AUTO, seen)
    named, again = _logits(folder, WeightFormat(auto.weight_storage), seen)
    assert np.array_equal(logits, wanted) and np.array_equal(again, wanted)
    assert 2 * auto.memory_plan()["weights"] == 2 * named.memory_plan()["weights"] == wide.memory_plan()["weights"]
    assert auto.fingerprint() == wide.fingerprint()

    # One matrix of a fused pair in float32: both become float32, and only they.
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].float()}, folder / "model.safetensors", {"format": "pt"})
    mixed, logits = _logits(folder, WeightFormat.AUTO, seen)
    assert np.array_equal(logits, wanted)
    assert mixed.memory_plan()["weights"] == auto.memory_plan()["weights"] + 2 * (2 * 128 * 64)


def test_values_beyond_float16_are_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = 70_000.0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(StartupError, match=r"down_proj.weight' has values beyond the range of float16"):
        TorchRunner(folder, 64, num_blocks=4, weight_format=WeightFormat.FLOAT16)
    TorchRunner(folder, 64, num_blocks=4, weight_format=WeightFormat.BFLOAT16)


def test_the_memory_check_counts_the_bytes_of_the_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_model(tmp_path)
    weights = Weights(folder)
    sizes = {name: name.bytes_of(weights) for name in WeightFormat}
    assert sizes[WeightFormat.AUTO] == sizes[WeightFormat.FLOAT32] > 1.9 * sizes[WeightFormat.FLOAT16]
    assert sizes[WeightFormat.FLOAT16] == sizes[WeightFormat.BFLOAT16] > 1.8 * sizes[WeightFormat.INT8]
    free = sizes[WeightFormat.FLOAT16] - 1
    monkeypatch.setattr(torch_runner, "available_bytes", lambda: free)
    TorchRunner(folder, 64, num_blocks=4, weight_format=WeightFormat.INT8)
    for name in (WeightFormat.AUTO, WeightFormat.FLOAT32, WeightFormat.FLOAT16):
        with pytest.raises(StartupError, match=f"weights: {sizes[name]:,} bytes needed, {free:,} available"):
            TorchRunner(folder, 64, num_blocks=4, weight_format=name)

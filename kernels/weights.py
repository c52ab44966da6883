"""Weight matrices as the kernels read them: panels of 16 columns, each panel one run of memory over the whole depth.

All packed weights lie in huge pages where the system gives them: one step reads them from end to end, and the address
translation of small pages alone would cost a tenth of it.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from kernels import cpu_gemm
from kernels.cpu_gemm import PANEL


class Storage(IntEnum):
    """How a packed matrix is kept. Arithmetic is float32 in all cases."""

    FLOAT32 = cpu_gemm.F32
    FLOAT16 = cpu_gemm.F16
    BFLOAT16 = cpu_gemm.BF16
    INT8 = cpu_gemm.INT8
    INT8_SHIFTED = cpu_gemm.INT8_SHIFTED
    INT4_SHIFTED = cpu_gemm.INT4_SHIFTED


_DTYPES = {
    Storage.FLOAT32: torch.float32,
    Storage.FLOAT16: torch.float16,
    Storage.BFLOAT16: torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix as integers: value[n, k] = codes[n, k] * scales[n, k // group] + offsets[n, k // group].

    codes: int8 [N, K] (0..15 where bits is 4); scales, offsets: float32 [N, K / group]; offsets None: all zero.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    group: int
    bits: int = 8

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def storage(self) -> Storage:
        if self.bits == 4:
            return Storage.INT4_SHIFTED
        return Storage.INT8 if self.offsets is None else Storage.INT8_SHIFTED

    def values(self) -> Tensor:
        """The float32 matrix that this stands for, with the bits that the kernels see."""
        wide = self.codes.float().view(self.shape[0], -1, self.group) * self.scales[:, :, None]
        if self.offsets is not None:
            # The product is exact (codes and scales have few bits), so this rounds once, as a fused multiply-add does.
            wide = wide + self.offsets[:, :, None]
        return wide.view(self.shape)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight matrix [columns, depth] in an even number of panels."""

    panels: Tensor
    """uint8 [panels, bytes of a panel]."""
    columns: int
    depth: int
    storage: Storage = Storage.FLOAT32
    group: int = 0
    bias: Tensor | None = None

    @property
    def panel_bytes(self) -> int:
        return self.panels.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.panels.numel()


_SLAB_BYTES = 64 << 20
_HUGE_PAGE = 2 << 20
_LINE = 64
_slab: Tensor = torch.empty(0, dtype=torch.uint8)
_slab_lock = threading.Lock()


def huge_bytes(count: int) -> Tensor:
    """uint8 [count], zero, 64-byte aligned, in huge pages where the system gives them.

    Matrices are smaller than a huge page or end within one, so they share slabs, which live as long as any part.
    """
    global _slab
    if count > _SLAB_BYTES // 4:
        return _mapped(count)
    with _slab_lock:
        if len(_slab) < count:
            _slab = _mapped(_SLAB_BYTES)
        piece, _slab = _slab[:count], _slab[-(-count // _LINE) * _LINE :]
    return piece


def _mapped(count: int) -> Tensor:
    """Memory of its own that begins on a border of huge pages."""
    memory = mmap.mmap(-1, count + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    skip = -whole.data_ptr() % _HUGE_PAGE
    return whole[skip : skip + count]


def quantize_int8(weight: Tensor) -> Codes:
    """Symmetric int8 for each output channel: weight float32 [N, K], scale = largest magnitude / 127."""
    scales = weight.abs().amax(1, keepdim=True) / 127.0
    codes = (weight / scales.clamp_min(1e-30)).round_().clamp_(-127, 127).to(torch.int8)
    return Codes(codes, scales, None, weight.shape[1])


def pack(
    weights: Sequence[Tensor | Codes],
    biases: Sequence[Tensor] = (),
    storage: Storage = Storage.FLOAT32,
    paired: bool = False,
) -> PackedWeight:
    """Pack matrices [n_i, depth], one under the other. Copies them.

    weights: float tensors, stored as `storage` (a float storage), or Codes that are all of one kind. biases: one vector
    [n_i] for each matrix, or none at all. paired: two matrices of equal shape, a multiple of 16 rows, whose panels
    alternate (for SwiGLU). Raises ValueError when they do not fit together, OSError when memory is short.
    """
    depth = weights[0].shape[1]
    columns = sum(w.shape[0] for w in weights)
    if any(len(w.shape) != 2 or w.shape[1] != depth for w in weights):
        raise ValueError("the matrices differ in depth")
    if paired and (len(weights) != 2 or weights[0].shape != weights[1].shape or columns % (2 * PANEL)):
        raise ValueError("paired weights are two matrices of one shape, a multiple of 16 rows")
    bias = torch.cat(list(biases)).float().contiguous() if biases else None
    if bias is not None and bias.shape != (columns,):
        raise ValueError(f"biases must have {columns} floats in all")
    if bias is not None and paired:
        bias = bias.view(2, -1, PANEL).transpose(0, 1).reshape(-1)
    coded = [w for w in weights if isinstance(w, Codes)]
    group = 0
    if coded:
        storage, group = coded[0].storage, coded[0].group
        if len(coded) != len(weights) or any((w.storage, w.group) != (storage, group) for w in coded):
            raise ValueError("the matrices are quantised differently")
        line = PANEL // 2 if storage is Storage.INT4_SHIFTED else PANEL
        head = (4 if storage is Storage.INT8 else 8) * PANEL
        panel_bytes = depth // group * (head + group * line)
    elif storage in _DTYPES:
        panel_bytes = depth * PANEL * _DTYPES[storage].itemsize
    else:
        raise ValueError(f"float weights cannot be packed as {storage.name}; quantise them first")
    panels = -(-columns // (2 * PANEL)) * 2
    memory = huge_bytes(panels * panel_bytes).view(panels, panel_bytes)
    stride = 2 if paired else 1
    row = 0
    for i, w in enumerate(weights):
        first, lane = (i, 0) if paired else divmod(row, PANEL)
        fill = _fill_codes if isinstance(w, Codes) else _fill_floats
        fill(memory[first::stride], lane, w, storage)  # type: ignore[arg-type]
        row += w.shape[0]
    return PackedWeight(memory, columns, depth, storage, group, bias)


def _by_panel(rows: Tensor, lane: int) -> list[tuple[int, int, Tensor]]:
    """Rows that begin at `lane` of a panel, cut at the borders of panels: (panel, lane, [panels, lanes, ...])."""
    pieces = []
    head = min((PANEL - lane) % PANEL, len(rows))
    if head:
        pieces.append((0, lane, rows[:head].unsqueeze(0)))
    start = 1 if lane else 0
    whole = (len(rows) - head) // PANEL
    if whole:
        middle = rows[head : head + whole * PANEL]
        pieces.append((start, 0, middle.view(whole, PANEL, *rows.shape[1:])))
    rest = rows[head + whole * PANEL :]
    if len(rest):
        pieces.append((start + whole, 0, rest.unsqueeze(0)))
    return pieces


def _fill_floats(panels: Tensor, lane: int, weight: Tensor, storage: Storage) -> None:
    target = panels.unflatten(1, (-1, PANEL * _DTYPES[storage].itemsize))
    for first, left, rows in _by_panel(weight, lane):
        count, lanes = rows.shape[:2]
        spot = target[first : first + count].view(_DTYPES[storage])
        spot[:, :, left : left + lanes].copy_(rows.transpose(1, 2))


def _fill_codes(panels: Tensor, lane: int, weight: Codes, storage: Storage) -> None:
    """panels: uint8 [panels, bytes]; a record a group: scales[16], offsets[16] if any, codes[group, 16]."""
    depth, group = weight.shape[1], weight.group
    records = panels.unflatten(1, (depth // group, -1))
    tables = [weight.scales] if weight.offsets is None else [weight.scales, weight.offsets]
    for i, table in enumerate(tables):
        numbers = records[:, :, 4 * PANEL * i : 4 * PANEL * (i + 1)]
        for first, left, rows in _by_panel(table, lane):
            count, lanes = rows.shape[:2]
            spot = numbers[first : first + count, :, 4 * left : 4 * (left + lanes)]
            spot.copy_(rows.transpose(1, 2).contiguous().view(torch.uint8))
    body = records[:, :, 4 * PANEL * len(tables) :]
    for first, left, rows in _by_panel(weight.codes, lane):
        count, lanes = rows.shape[:2]
        codes = rows.view(torch.uint8).unflatten(2, (-1, group)).permute(0, 2, 3, 1)
        if storage is not Storage.INT4_SHIFTED:
            body[first : first + count].unflatten(2, (group, PANEL))[..., left : left + lanes].copy_(codes)
            continue
        lines = body[first : first + count].unflatten(2, (group, PANEL // 2))
        if lanes == PANEL:
            lines.copy_(codes[..., : PANEL // 2] | codes[..., PANEL // 2 :] << 4)
            continue
        for j in range(lanes):
            shift = 4 * ((left + j) // 8)
            lines[..., (left + j) % 8] |= codes[..., j] << shift

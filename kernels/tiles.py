"""Register tiles of the matrix product, as LLVM IR: C[rows, 16 * streams] (+)= A[rows, depth] @ B[depth, 16 * streams].

Each element of C is one chain of fused multiply-adds over ascending depth, whatever the tile: a row may be computed by
any of them without changing a bit. B may be stored in half the bytes: widening to float32 is exact, so a tile over
float16 equals the tile over the same values in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.micro import F32, I32, I64, LANES, VEC, VEC_I, load, loop, muladd, splat, store

_HALVES = ir.VectorType(ir.IntType(16), LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_NIBBLES = ir.VectorType(ir.IntType(8), LANES // 2)


def _wide_f32(builder: Any, at: Any) -> Any:
    return load(builder, at, VEC)


def _wide_f16(builder: Any, at: Any) -> Any:
    return builder.fpext(load(builder, at, ir.VectorType(ir.HalfType(), LANES), align=2), VEC)


def _wide_bf16(builder: Any, at: Any) -> Any:
    bits = builder.zext(load(builder, at, _HALVES, align=2), VEC_I)
    return builder.bitcast(builder.shl(bits, ir.Constant(VEC_I, [16] * LANES)), VEC)


def _wide_int8(builder: Any, at: Any) -> Any:
    return builder.sitofp(builder.sext(load(builder, at, _BYTES, align=1), VEC_I), VEC)


def _wide_int4(builder: Any, at: Any) -> Any:
    """16 codes 0..15 in 8 bytes: lane i in the low half of byte i, lane i + 8 in its high half."""
    pairs = load(builder, at, _NIBBLES, align=1)
    kind = ir.VectorType(ir.IntType(8), LANES // 2)
    low = builder.and_(pairs, ir.Constant(kind, [15] * 8))
    high = builder.lshr(pairs, ir.Constant(kind, [4] * 8))
    both = builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, LANES), list(range(LANES))))
    return builder.sitofp(builder.zext(both, VEC_I), VEC)


def prefetch(builder: Any, address: Any, locality: int = 2) -> None:
    """A hint that the cache line at `address` will be read; it may point anywhere."""
    byte = ir.IntType(8).as_pointer()
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32]), "llvm.prefetch.p0i8"
    )
    builder.call(function, [builder.inttoptr(address, byte), I32(0), I32(locality), I32(1)])


def _make_tile(rows: int, streams: int = 1, wide: Callable[[Any, Any], Any] = _wide_f32, ahead: int = 0) -> Any:
    """`streams` panels of B are read side by side, `gap` bytes apart.

    With `ahead`, every so many steps of the depth k also ask for the cache line at hint + k * hint_step (and gap bytes
    further); the loop is unrolled as often.
    """
    unroll = max(ahead, 1)

    @intrinsic
    def tile(typingctx, c, ldc, a, lda, b, ldb, gap, depth, accumulate, hint, hint_step):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            c, ldc, a, lda, b, ldb, gap, depth, accumulate, hint, hint_step = args
            four = I64(4)
            ldc, lda = builder.mul(ldc, four), builder.mul(lda, four)
            c_rows = [builder.add(c, builder.mul(ldc, I64(r))) for r in range(rows)]
            a_rows = [builder.add(a, builder.mul(lda, I64(r))) for r in range(rows)]
            b_starts = [builder.add(b, builder.mul(gap, I64(s))) for s in range(streams)]
            hints = [builder.add(hint, builder.mul(gap, I64(s))) for s in range(streams)]
            spots = [builder.add(row, I64(4 * LANES * s)) for row in c_rows for s in range(streams)]
            zero = ir.Constant(VEC, [0.0] * LANES)
            with builder.if_else(accumulate) as (yes, no):
                with yes:
                    loaded = [load(builder, spot, VEC) for spot in spots]
                    yes_block = builder.block
                with no:
                    no_block = builder.block
            initial = []
            for value in loaded:
                phi = builder.phi(VEC)
                phi.add_incoming(value, yes_block)
                phi.add_incoming(zero, no_block)
                initial.append(phi)

            def ask_and_step(index: Any, sums: list[Any]) -> list[Any]:
                first = builder.mul(index, I64(unroll))
                if ahead:
                    for start in hints:
                        prefetch(builder, builder.add(start, builder.mul(first, hint_step)))
                for j in range(unroll):
                    sums = step(builder.add(first, I64(j)), sums)
                return sums

            def step(index: Any, sums: list[Any]) -> list[Any]:
                at = builder.mul(index, ldb)
                columns = [wide(builder, builder.add(start, at)) for start in b_starts]
                offset = builder.mul(index, four)
                new = []
                for r in range(rows):
                    scalar = splat(builder, load(builder, builder.add(a_rows[r], offset), F32))
                    new += [muladd(builder, scalar, columns[s], sums[r * streams + s]) for s in range(streams)]
                return new

            sums = loop(builder, builder.sdiv(depth, I64(unroll)), initial, ask_and_step)
            if unroll > 1:
                left = builder.srem(depth, I64(unroll))
                done = builder.sub(depth, left)
                sums = loop(builder, left, sums, lambda index, values: step(builder.add(done, index), values))
            for value, spot in zip(sums, spots, strict=True):
                store(builder, value, spot)
            return context.get_dummy_value()

        kinds = [types.int64] * 8 + [types.boolean] + [types.int64] * 2
        return types.void(*kinds), codegen

    return tile


plain_1 = _make_tile(1)
plain_2 = _make_tile(2)
plain_3 = _make_tile(3)
plain_4 = _make_tile(4)
plain_5 = _make_tile(5)
plain_6 = _make_tile(6)

f32_1x2 = _make_tile(1, 2, ahead=1)
f32_2x2 = _make_tile(2, 2, ahead=1)
f32_3x2 = _make_tile(3, 2, ahead=1)
f32_3 = _make_tile(3, ahead=1)
f32_4 = _make_tile(4, ahead=1)
f32_5 = _make_tile(5, ahead=1)
f32_6 = _make_tile(6, ahead=1)

busy_4 = _make_tile(4, ahead=4)
busy_5 = _make_tile(5, ahead=4)
busy_6 = _make_tile(6, ahead=4)

f16_1x2 = _make_tile(1, 2, _wide_f16, ahead=1)
f16_2x2 = _make_tile(2, 2, _wide_f16, ahead=1)
f16_3x2 = _make_tile(3, 2, _wide_f16, ahead=1)
f16_3 = _make_tile(3, 1, _wide_f16, ahead=1)
f16_4 = _make_tile(4, 1, _wide_f16, ahead=1)
f16_5 = _make_tile(5, 1, _wide_f16, ahead=1)
f16_6 = _make_tile(6, 1, _wide_f16, ahead=1)
"""tile(c, ldc, a, lda, b, ldb, gap, depth, accumulate, hint, hint_step): addresses, ldb, gap and hint_step in bytes,
ldc and lda in floats. The first number is the rows, the second the panels that are read side by side. `busy`
tiles have company that shares the hints: one in four steps is enough.
"""


def _make_widen(wide: Callable[[Any, Any], Any], scaled: bool, shifted: bool) -> Any:
    @intrinsic
    def widen(typingctx, target, source, source_step, scales, offsets, depth):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            target, source, source_step, scales, offsets, depth = args
            scale = load(builder, scales, VEC) if scaled else None
            offset = load(builder, offsets, VEC) if shifted else None

            def step(index: Any, _: list[Any]) -> list[Any]:
                value = wide(builder, builder.add(source, builder.mul(index, source_step)))
                if shifted:
                    value = muladd(builder, value, scale, offset)
                elif scaled:
                    value = builder.fmul(value, scale)
                store(builder, value, builder.add(target, builder.mul(index, I64(4 * LANES))))
                return []

            loop(builder, depth, [], step)
            return context.get_dummy_value()

        return types.void(*([types.int64] * 6)), codegen

    return widen


widen_f16 = _make_widen(_wide_f16, False, False)
widen_bf16 = _make_widen(_wide_bf16, False, False)
widen_int8 = _make_widen(_wide_int8, True, False)
widen_int8_shifted = _make_widen(_wide_int8, True, True)
widen_int4_shifted = _make_widen(_wide_int4, True, True)
"""widen(target, source, source_step, scales, offsets, depth): target[k, 16] = source[k, 16] * scales[16] + offsets[16]
as float32, for k < depth. Addresses and source_step in bytes; scales and offsets only where the name says so.
"""


@intrinsic
def prefetch_lines(typingctx, address, lines):  # type: ignore[no-untyped-def]
    """Ask for `lines` cache lines of 64 bytes from `address` on; a hint that may point anywhere."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        address, lines = args

        def step(index: Any, _: list[Any]) -> list[Any]:
            prefetch(builder, builder.add(address, builder.mul(index, I64(64))))
            return []

        loop(builder, lines, [], step)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen

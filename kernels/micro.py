"""Vector building blocks for the numba kernels, written as LLVM IR so that the order of every floating-point
operation is ours.

Each is a numba intrinsic over raw addresses (int64, bytes). A row's result depends on that row's data only: the
kernels above may group rows, tiles and threads as they like without changing a bit. Nothing here checks anything;
`kernels.ops` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
"""Columns of one tile: a <16 x float>, which LLVM lowers to whatever the machine has."""

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_VEC = ir.VectorType(_F32, LANES)
_VEC_I = ir.VectorType(_I32, LANES)


def _splat(builder: Any, value: Any, vector: Any = _VEC) -> Any:
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, _I32(0))
    mask = ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), mask)


def _constant(value: float) -> Any:
    return ir.Constant(_VEC, [value] * LANES)


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=4)


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def _muladd(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, fused where the machine can."""
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(a.type, [a.type] * 3), f"llvm.fmuladd.v{a.type.count}f32"
    )
    return builder.call(function, [a, b, c])


def _tree(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Reduce the lanes of `vector` to one scalar by halving."""
    count = vector.type.count
    while count > 1:
        count //= 2
        mask = ir.VectorType(_I32, count)
        low = builder.shuffle_vector(vector, vector, ir.Constant(mask, list(range(count))))
        high = builder.shuffle_vector(vector, vector, ir.Constant(mask, list(range(count, 2 * count))))
        vector = combine(low, high)
    return builder.extract_element(vector, _I32(0))


def _maximum(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _loop(builder: Any, count: Any, initial: Sequence[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """A counted loop that carries values in registers; `body(index, values)` returns the next values. count may be
    0.
    """
    before = builder.block
    head = builder.append_basic_block("head")
    inside = builder.append_basic_block("inside")
    after = builder.append_basic_block("after")
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(_I64)
    index.add_incoming(_I64(0), before)
    values = []
    for value in initial:
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        values.append(phi)
    builder.cbranch(builder.icmp_signed("<", index, count), inside, after)
    builder.position_at_end(inside)
    following = body(index, values)
    index.add_incoming(builder.add(index, _I64(1)), builder.block)
    for phi, value in zip(values, following, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return values


def _make_tile(rows: int, vectors: int) -> Any:
    @intrinsic
    def tile(typingctx, c, ldc, a, lda, b, ldb, depth, accumulate):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            c, ldc, a, lda, b, ldb, depth, accumulate = args
            four = _I64(4)
            ldc, lda, ldb = (builder.mul(stride, four) for stride in (ldc, lda, ldb))
            c_rows = [builder.add(c, builder.mul(ldc, _I64(r))) for r in range(rows)]
            a_rows = [builder.add(a, builder.mul(lda, _I64(r))) for r in range(rows)]
            spots = [builder.add(row, _I64(4 * LANES * v)) for row in c_rows for v in range(vectors)]
            zero = ir.Constant(_VEC, [0.0] * LANES)
            with builder.if_else(accumulate) as (yes, no):
                with yes:
                    loaded = [_load(builder, spot, _VEC) for spot in spots]
                    yes_block = builder.block
                with no:
                    no_block = builder.block
            initial = []
            for value in loaded:
                phi = builder.phi(_VEC)
                phi.add_incoming(value, yes_block)
                phi.add_incoming(zero, no_block)
                initial.append(phi)

            def step(index: Any, sums: list[Any]) -> list[Any]:
                at = builder.add(b, builder.mul(index, ldb))
                columns = [_load(builder, builder.add(at, _I64(4 * LANES * v)), _VEC) for v in range(vectors)]
                offset = builder.mul(index, four)
                new = []
                for r in range(rows):
                    scalar = _splat(builder, _load(builder, builder.add(a_rows[r], offset), _F32))
                    new += [_muladd(builder, scalar, columns[v], sums[r * vectors + v]) for v in range(vectors)]
                return new

            for value, spot in zip(_loop(builder, depth, initial, step), spots, strict=True):
                _store(builder, value, spot)
            return context.get_dummy_value()

        signature = types.void(*([types.int64] * 7), types.boolean)
        return signature, codegen

    return tile


tile_1 = _make_tile(1, 1)
tile_2 = _make_tile(2, 1)
tile_3 = _make_tile(3, 1)
tile_4 = _make_tile(4, 1)
tile_6 = _make_tile(6, 1)
tile_1x4 = _make_tile(1, 4)
tile_2x2 = _make_tile(2, 2)
tile_3x2 = _make_tile(3, 2)
"""tile_RxV(c, ldc, a, lda, b, ldb, depth, accumulate): C[R, 16 V] = (C if accumulate else 0) + A[R, depth] @ B[depth,
16 V].

Addresses in bytes, strides in floats. Each element is one chain of fused multiply-adds over ascending depth.
"""


@intrinsic
def transpose_8x8(typingctx, target, target_stride, source, source_stride):  # type: ignore[no-untyped-def]
    """target[j, i] = source[i, j] for an 8 x 8 patch of floats. Addresses in bytes, strides in floats."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        target, target_stride, source, source_stride = args
        half = ir.VectorType(_F32, 8)
        target_stride = builder.mul(target_stride, _I64(4))
        source_stride = builder.mul(source_stride, _I64(4))
        rows = [_load(builder, builder.add(source, builder.mul(source_stride, _I64(i))), half) for i in range(8)]

        def mix(x: Any, y: Any, mask: list[int]) -> Any:
            return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(_I32, 8), mask))

        low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
        t = [mix(rows[i], rows[i + 1], mask) for i in (0, 2, 4, 6) for mask in (low, high)]
        front, back = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
        u = [mix(t[i + j], t[i + j + 2], mask) for i in (0, 4) for j in (0, 1) for mask in (front, back)]
        first, second = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
        columns = [mix(u[i], u[i + 4], mask) for mask in (first, second) for i in range(4)]
        for j, column in enumerate(columns):
            _store(builder, column, builder.add(target, builder.mul(target_stride, _I64(j))))
        return context.get_dummy_value()

    return types.void(*([types.int64] * 4)), codegen


def _exp(builder: Any, x: Any) -> Any:
    """exp of a vector of values <= 88, relative error below 2e-7; exactly 0 under -87.

    Range reduction by ln 2 in two parts and the minimax polynomial of Cephes' expf.
    """
    tiny = builder.fcmp_ordered("<", x, _constant(-87.0))
    x = builder.select(tiny, _constant(-87.0), x)
    magic = _constant(12582912.0)
    shifted = _muladd(builder, x, _constant(math.log2(math.e)), magic)
    whole = builder.fsub(shifted, magic)
    rest = _muladd(builder, whole, _constant(-0.693359375), x)
    rest = _muladd(builder, whole, _constant(2.12194440e-4), rest)
    poly = _constant(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        poly = _muladd(builder, poly, rest, _constant(c))
    result = builder.fadd(_muladd(builder, poly, builder.fmul(rest, rest), rest), _constant(1.0))
    exponent = builder.sub(builder.bitcast(shifted, _VEC_I), builder.bitcast(magic, _VEC_I))
    bits = builder.shl(builder.add(exponent, ir.Constant(_VEC_I, [127] * LANES)), ir.Constant(_VEC_I, [23] * LANES))
    return builder.select(tiny, _constant(0.0), builder.fmul(result, builder.bitcast(bits, _VEC)))


@intrinsic
def softmax_row(typingctx, scores, vectors, old_max):  # type: ignore[no-untyped-def]
    """One online-softmax step over a row of 16 * vectors scores, in place: scores[j] = exp(scores[j] - max).

    Returns (max over old_max and the row, sum of the new values). Masked scores are -inf and become exactly 0;
    old_max must be finite.
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        scores, vectors, old_max = args

        def at(index: Any) -> Any:
            return builder.add(scores, builder.mul(index, _I64(4 * LANES)))

        (peak,) = _loop(
            builder,
            vectors,
            [_splat(builder, old_max)],
            lambda i, v: [_maximum(builder, v[0], _load(builder, at(i), _VEC))],
        )
        peak = _tree(builder, peak, lambda a, b: _maximum(builder, a, b))
        wide = _splat(builder, peak)

        def step(index: Any, sums: list[Any]) -> list[Any]:
            value = _exp(builder, builder.fsub(_load(builder, at(index), _VEC), wide))
            _store(builder, value, at(index))
            return [builder.fadd(sums[0], value)]

        (total,) = _loop(builder, vectors, [_constant(0.0)], step)
        total = _tree(builder, total, lambda a, b: builder.fadd(a, b))
        return context.make_tuple(builder, signature.return_type, (peak, total))

    return types.UniTuple(types.float32, 2)(types.int64, types.int64, types.float32), codegen


@intrinsic
def exp_scalar(typingctx, x):  # type: ignore[no-untyped-def]
    """exp of one float32 by the same polynomial as `softmax_row`."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.extract_element(_exp(builder, _splat(builder, args[0])), _I32(0))

    return types.float32(types.float32), codegen


@intrinsic
def swiglu_vectors(typingctx, target, gate, up, vectors):  # type: ignore[no-untyped-def]
    """target[j] = silu(gate[j]) * up[j] over 16 * vectors floats."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        target, gate, up, vectors = args

        def step(index: Any, _: list[Any]) -> list[Any]:
            offset = builder.mul(index, _I64(4 * LANES))
            g = _load(builder, builder.add(gate, offset), _VEC)
            magnitude = _maximum(builder, g, builder.fneg(g))
            small = _exp(builder, builder.fneg(magnitude))
            positive = builder.fcmp_ordered(">=", g, _constant(0.0))
            top = builder.select(positive, _constant(1.0), small)
            silu = builder.fmul(g, builder.fdiv(top, builder.fadd(_constant(1.0), small)))
            u = _load(builder, builder.add(up, offset), _VEC)
            _store(builder, builder.fmul(silu, u), builder.add(target, offset))
            return []

        _loop(builder, vectors, [], step)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 4)), codegen


@intrinsic
def sum_of_squares(typingctx, source, vectors):  # type: ignore[no-untyped-def]
    """Sum of squares of 16 * vectors floats: 16 chains over ascending index, then a tree."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        source, vectors = args

        def step(index: Any, sums: list[Any]) -> list[Any]:
            x = _load(builder, builder.add(source, builder.mul(index, _I64(4 * LANES))), _VEC)
            return [_muladd(builder, x, x, sums[0])]

        (total,) = _loop(builder, vectors, [_constant(0.0)], step)
        return _tree(builder, total, lambda a, b: builder.fadd(a, b))

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def fetch_add(typingctx, address, amount):  # type: ignore[no-untyped-def]
    """Atomically add to the int64 at `address`; returns the value before."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def pointer(typingctx, address):  # type: ignore[no-untyped-def]
    """An int64 address as a void pointer, for `numba.carray`."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@intrinsic
def prefetch_lines(typingctx, address, lines):  # type: ignore[no-untyped-def]
    """Ask for `lines` cache lines of 64 bytes from `address` on; a hint that may point anywhere."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        address, lines = args
        byte = ir.IntType(8).as_pointer()
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32]), "llvm.prefetch.p0i8"
        )

        def step(index: Any, _: list[Any]) -> list[Any]:
            spot = builder.inttoptr(builder.add(address, builder.mul(index, _I64(64))), byte)
            builder.call(function, [spot, _I32(0), _I32(2), _I32(1)])
            return []

        _loop(builder, lines, [], step)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen

"""Vector building blocks for the numba kernels, written as LLVM IR so that the order of every floating-point
operation is ours.

Each is a numba intrinsic over raw addresses (int64, bytes). A row's result depends on that row's data only: the
kernels above may group rows, tiles and threads as they like without changing a bit. Nothing here checks anything;
`kernels.ops` does.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
"""Columns of one tile: a <16 x float>, which LLVM lowers to whatever the machine has."""

F32 = ir.FloatType()
I32 = ir.IntType(32)
I64 = ir.IntType(64)
VEC = ir.VectorType(F32, LANES)
VEC_I = ir.VectorType(I32, LANES)


def splat(builder: Any, value: Any, vector: Any = VEC) -> Any:
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, I32(0))
    mask = ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), mask)


def _constant(value: float) -> Any:
    return ir.Constant(VEC, [value] * LANES)


def load(builder: Any, address: Any, kind: Any, align: int = 4) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def muladd(builder: Any, a: Any, b: Any, c: Any) -> Any:
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
        mask = ir.VectorType(I32, count)
        low = builder.shuffle_vector(vector, vector, ir.Constant(mask, list(range(count))))
        high = builder.shuffle_vector(vector, vector, ir.Constant(mask, list(range(count, 2 * count))))
        vector = combine(low, high)
    return builder.extract_element(vector, I32(0))


def _maximum(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def loop(builder: Any, count: Any, initial: Sequence[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """A counted loop that carries values in registers; `body(index, values)` returns the next values. count may be
    0.
    """
    before = builder.block
    head = builder.append_basic_block("head")
    inside = builder.append_basic_block("inside")
    after = builder.append_basic_block("after")
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(I64)
    index.add_incoming(I64(0), before)
    values = []
    for value in initial:
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        values.append(phi)
    builder.cbranch(builder.icmp_signed("<", index, count), inside, after)
    builder.position_at_end(inside)
    following = body(index, values)
    index.add_incoming(builder.add(index, I64(1)), builder.block)
    for phi, value in zip(values, following, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return values


@intrinsic
def transpose_8x8(typingctx, target, target_stride, source, source_stride):  # type: ignore[no-untyped-def]
    """target[j, i] = source[i, j] for an 8 x 8 patch of floats. Addresses in bytes, strides in floats."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        target, target_stride, source, source_stride = args
        half = ir.VectorType(F32, 8)
        target_stride = builder.mul(target_stride, I64(4))
        source_stride = builder.mul(source_stride, I64(4))
        rows = [load(builder, builder.add(source, builder.mul(source_stride, I64(i))), half) for i in range(8)]

        def mix(x: Any, y: Any, mask: list[int]) -> Any:
            return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, 8), mask))

        low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
        t = [mix(rows[i], rows[i + 1], mask) for i in (0, 2, 4, 6) for mask in (low, high)]
        front, back = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
        u = [mix(t[i + j], t[i + j + 2], mask) for i in (0, 4) for j in (0, 1) for mask in (front, back)]
        first, second = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
        columns = [mix(u[i], u[i + 4], mask) for mask in (first, second) for i in range(4)]
        for j, column in enumerate(columns):
            store(builder, column, builder.add(target, builder.mul(target_stride, I64(j))))
        return context.get_dummy_value()

    return types.void(*([types.int64] * 4)), codegen


def _exp(builder: Any, x: Any) -> Any:
    """exp of a vector of values <= 88, relative error below 2e-7; exactly 0 under -87.

    Range reduction by ln 2 in two parts and the minimax polynomial of Cephes' expf.
    """
    tiny = builder.fcmp_ordered("<", x, _constant(-87.0))
    x = builder.select(tiny, _constant(-87.0), x)
    magic = _constant(12582912.0)
    shifted = muladd(builder, x, _constant(math.log2(math.e)), magic)
    whole = builder.fsub(shifted, magic)
    rest = muladd(builder, whole, _constant(-0.693359375), x)
    rest = muladd(builder, whole, _constant(2.12194440e-4), rest)
    poly = _constant(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        poly = muladd(builder, poly, rest, _constant(c))
    result = builder.fadd(muladd(builder, poly, builder.fmul(rest, rest), rest), _constant(1.0))
    exponent = builder.sub(builder.bitcast(shifted, VEC_I), builder.bitcast(magic, VEC_I))
    bits = builder.shl(builder.add(exponent, ir.Constant(VEC_I, [127] * LANES)), ir.Constant(VEC_I, [23] * LANES))
    return builder.select(tiny, _constant(0.0), builder.fmul(result, builder.bitcast(bits, VEC)))


@intrinsic
def softmax_row(typingctx, scores, vectors, old_max):  # type: ignore[no-untyped-def]
    """One online-softmax step over a row of 16 * vectors scores, in place: scores[j] = exp(scores[j] - max).

    Returns (max over old_max and the row, sum of the new values). Masked scores are -inf and become exactly 0;
    old_max must be finite.
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        scores, vectors, old_max = args

        def at(index: Any) -> Any:
            return builder.add(scores, builder.mul(index, I64(4 * LANES)))

        (peak,) = loop(
            builder,
            vectors,
            [splat(builder, old_max)],
            lambda i, v: [_maximum(builder, v[0], load(builder, at(i), VEC))],
        )
        peak = _tree(builder, peak, lambda a, b: _maximum(builder, a, b))
        wide = splat(builder, peak)

        def step(index: Any, sums: list[Any]) -> list[Any]:
            value = _exp(builder, builder.fsub(load(builder, at(index), VEC), wide))
            store(builder, value, at(index))
            return [builder.fadd(sums[0], value)]

        (total,) = loop(builder, vectors, [_constant(0.0)], step)
        total = _tree(builder, total, lambda a, b: builder.fadd(a, b))
        return context.make_tuple(builder, signature.return_type, (peak, total))

    return types.UniTuple(types.float32, 2)(types.int64, types.int64, types.float32), codegen


@intrinsic
def exp_scalar(typingctx, x):  # type: ignore[no-untyped-def]
    """exp of one float32 by the same polynomial as `softmax_row`."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.extract_element(_exp(builder, splat(builder, args[0])), I32(0))

    return types.float32(types.float32), codegen


@intrinsic
def swiglu_vectors(typingctx, target, gate, up, vectors):  # type: ignore[no-untyped-def]
    """target[j] = silu(gate[j]) * up[j] over 16 * vectors floats."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        target, gate, up, vectors = args

        def step(index: Any, _: list[Any]) -> list[Any]:
            offset = builder.mul(index, I64(4 * LANES))
            g = load(builder, builder.add(gate, offset), VEC)
            magnitude = _maximum(builder, g, builder.fneg(g))
            small = _exp(builder, builder.fneg(magnitude))
            positive = builder.fcmp_ordered(">=", g, _constant(0.0))
            top = builder.select(positive, _constant(1.0), small)
            silu = builder.fmul(g, builder.fdiv(top, builder.fadd(_constant(1.0), small)))
            u = load(builder, builder.add(up, offset), VEC)
            store(builder, builder.fmul(silu, u), builder.add(target, offset))
            return []

        loop(builder, vectors, [], step)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 4)), codegen


@intrinsic
def row_peak(typingctx, source, vectors):  # type: ignore[no-untyped-def]
    """(largest of 16 * vectors floats, sum of them times 0): the second is 0 if all are finite, else NaN."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        source, vectors = args

        def step(index: Any, values: list[Any]) -> list[Any]:
            x = load(builder, builder.add(source, builder.mul(index, I64(4 * LANES))), VEC)
            return [_maximum(builder, x, values[0]), muladd(builder, x, _constant(0.0), values[1])]

        peak, zero = loop(builder, vectors, [_constant(-math.inf), _constant(0.0)], step)
        peak = _tree(builder, peak, lambda a, b: _maximum(builder, a, b))
        zero = _tree(builder, zero, lambda a, b: builder.fadd(a, b))
        return context.make_tuple(builder, signature.return_type, (peak, zero))

    return types.UniTuple(types.float32, 2)(types.int64, types.int64), codegen


@intrinsic
def sum_of_squares(typingctx, source, vectors):  # type: ignore[no-untyped-def]
    """Sum of squares of 16 * vectors floats: 16 chains over ascending index, then a tree."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        source, vectors = args

        def step(index: Any, sums: list[Any]) -> list[Any]:
            x = load(builder, builder.add(source, builder.mul(index, I64(4 * LANES))), VEC)
            return [muladd(builder, x, x, sums[0])]

        (total,) = loop(builder, vectors, [_constant(0.0)], step)
        return _tree(builder, total, lambda a, b: builder.fadd(a, b))

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def fetch_add(typingctx, address, amount):  # type: ignore[no-untyped-def]
    """Atomically add to the int64 at `address`; returns the value before."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def pointer(typingctx, address):  # type: ignore[no-untyped-def]
    """An int64 address as a void pointer, for `numba.carray`."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@intrinsic
def load_shared(typingctx, address):  # type: ignore[no-untyped-def]
    """The int64 at `address`, which another thread may just have changed."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.load_atomic(builder.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def call_body(typingctx, function, block, thread):  # type: ignore[no-untyped-def]
    """Call the compiled `void(int64, int64)` at the address `function`."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        function, block, thread = args
        kind = ir.FunctionType(ir.VoidType(), [I64, I64])
        builder.call(builder.inttoptr(function, kind.as_pointer()), [block, thread])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def call_int(typingctx, function):  # type: ignore[no-untyped-def]
    """Call the C function `int(void)` at the address `function`."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(I32, [])
        return builder.sext(builder.call(builder.inttoptr(args[0], kind.as_pointer()), []), I64)

    return types.int64(types.int64), codegen


@intrinsic
def call_sleep(typingctx, function, microseconds):  # type: ignore[no-untyped-def]
    """Call usleep, the C function `int(unsigned)` at the address `function`."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(I32, [I32])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [builder.trunc(args[1], I32)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):  # type: ignore[no-untyped-def]
    """Tell the core that this is a waiting loop; nothing on machines without such an instruction."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), codegen

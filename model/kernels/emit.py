"""Building blocks for inner loops that are written as LLVM code, since the compiler does not find them by itself."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils

from tokenteller.model.kernels.target import LANES, PANEL

F32, F16, I8, I16, I32, I64 = ir.FloatType(), ir.HalfType(), *map(ir.IntType, (8, 16, 32, 64))
FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)  # one register each
ZEROS = ir.Constant(FLOATS, [0.0] * LANES)
COLUMNS = range(0, PANEL, LANES)  # where each register of a panel begins


def constant(value):  # type: ignore[no-untyped-def]
    """A register with the same 32-bit integer in each lane."""
    return ir.Constant(INTS, [value] * LANES)


def data(context, builder, type_, array):  # type: ignore[no-untyped-def]
    """The address of an array's first element."""
    return context.make_array(type_)(context, builder, array).data


def load(builder, base, index, vector):  # type: ignore[no-untyped-def]
    place = builder.bitcast(builder.gep(base, [index]), vector.as_pointer())
    return builder.load(place, align=1)


def load_up_to(builder, base, index, length, rest):  # type: ignore[no-untyped-def]
    """LANES floats of an array of `length`; lanes past its end are those of `rest`."""
    place = builder.bitcast(builder.gep(base, [index]), FLOATS.as_pointer())
    lanes = builder.add(splat(builder, builder.trunc(index, I32)), ir.Constant(INTS, list(range(LANES))))
    inside = builder.icmp_signed("<", lanes, splat(builder, builder.trunc(length, I32)))
    return call(builder, f"llvm.masked.load.v{LANES}f32.p0", FLOATS, place, I32(4), inside, rest)


def store(builder, value, base, index):  # type: ignore[no-untyped-def]
    builder.store(value, builder.bitcast(builder.gep(base, [index]), value.type.as_pointer()), align=1)


def prefetch(builder, base, index):  # type: ignore[no-untyped-def]
    """Prefetches an element's cache line for reading, into level 2."""
    place = builder.bitcast(builder.gep(base, [index]), I8.as_pointer())
    call(builder, "llvm.prefetch.p0", ir.VoidType(), place, I32(0), I32(2), I32(1))


def splat(builder, value):  # type: ignore[no-untyped-def]
    """A register with `value` in each lane."""
    undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, value, I32(0))
    return builder.shuffle_vector(first, undefined, constant(0))


def call(builder, name, result, *args):  # type: ignore[no-untyped-def]
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def fma(builder, a, b, total):  # type: ignore[no-untyped-def]
    """total + a x b, rounded once."""
    return call(builder, f"llvm.fma.v{LANES}f32", FLOATS, a, b, total)


def widened(builder, dtype, base, index):  # type: ignore[no-untyped-def]
    """LANES numbers as fp32; dtype: float32, uint16 for the bits of fp16, int16 for those of bf16."""
    if dtype == types.float32:
        return load(builder, base, index, FLOATS)
    if dtype == types.uint16:
        base = builder.bitcast(base, F16.as_pointer())
        return builder.fpext(load(builder, base, index, ir.VectorType(F16, LANES)), FLOATS)
    high = builder.zext(load(builder, base, index, ir.VectorType(I16, LANES)), INTS)
    return builder.bitcast(builder.shl(high, constant(16)), FLOATS)


def sum_lanes(builder, vectors):  # type: ignore[no-untyped-def]
    """One register with the sum over the lanes of each of LANES registers; lanes are added in pairs, then pairs."""
    width = 1
    while len(vectors) > 1:
        low = [at + n + way for at in range(0, LANES, 2 * width) for way in (0, LANES) for n in range(width)]
        first, second = (ir.Constant(INTS, [at + shift for at in low]) for shift in (0, width))
        vectors = [
            builder.fadd(builder.shuffle_vector(a, b, first), builder.shuffle_vector(a, b, second))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        width *= 2
    return vectors[0]


def sum_halves(builder, vector):  # type: ignore[no-untyped-def]
    """The sum over the lanes of a vector of any width: its halves are added, then the halves of that."""
    while vector.type.count > 1:
        half = vector.type.count // 2
        low, high = (ir.Constant(ir.VectorType(I32, half), list(range(at, at + half))) for at in (0, half))
        vector = builder.fadd(builder.shuffle_vector(vector, vector, low), builder.shuffle_vector(vector, vector, high))
        if half == 1:
            return builder.extract_element(vector, I32(0))
    return vector


class Loop:
    """for at in range(length), at least once, with values that are carried from one round to the next."""

    def __init__(self, builder, length, carried):  # type: ignore[no-untyped-def]
        self.builder, self.length, self.before = builder, length, builder.block
        self.body = builder.append_basic_block()
        builder.branch(self.body)
        builder.position_at_end(self.body)
        self.at = builder.phi(I64)
        self.at.add_incoming(I64(0), self.before)
        self.carried = [builder.phi(value.type) for value in carried]
        for phi, value in zip(self.carried, carried, strict=True):
            phi.add_incoming(value, self.before)

    def end(self, carried):  # type: ignore[no-untyped-def]
        """Closes the loop; the values after its last round are `carried`."""
        builder, last = self.builder, self.builder.block
        step = builder.add(self.at, I64(1))
        self.at.add_incoming(step, last)
        for phi, value in zip(self.carried, carried, strict=True):
            phi.add_incoming(value, last)
        after = builder.append_basic_block()
        builder.cbranch(builder.icmp_signed("<", step, self.length), self.body, after)
        builder.position_at_end(after)

"""Kernels: compiled functions over a range of tasks, shared out among the threads by whoever launches them.

A kernel is compiled once, by itself, and called by its symbol; what launches it holds no copy of its code. numba's own
way (prange, and functions that call each other) compiles a loop again in each function around it, which took four times
as long. It also lets processes of their own compile the kernels at the same time (`workers`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

import tokenteller.model.kernels.cache as cache
from tokenteller.model.kernels.emit import I32, I64
from tokenteller.model.kernels.target import EXACT
from tokenteller.model.kernels.workers import workers

_BYTES = ir.IntType(8).as_pointer()
_WORDS = I64.as_pointer()
_CALLBACK = ir.FunctionType(ir.VoidType(), [_BYTES.as_pointer(), _WORDS, _WORDS, _BYTES])  # what numba's pools call

ArgTypes = tuple[Any, ...]  # numba's types of a kernel's arguments after begin and stop

# Changed in worker processes, which compile for the disk only.
compile_elsewhere = workers.submit
runs_here = True


class Kernel:
    """A function (begin, stop, *args) -> None, for tasks begin..stop-1."""

    def __init__(self, function: Callable[..., None], flags: dict[str, Any]) -> None:
        self.name = function.__name__
        self.body = njit(**flags, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
        self.body._cache = cache.DiskCache(self.name, load_kernels)

    def symbol(self, args: ArgTypes) -> str:
        return f"{cache.SYMBOL}{self.name}.{hashlib.sha256(repr(args).encode()).hexdigest()[:16]}"

    def announce(self, args: ArgTypes) -> None:
        """Has another process compile it for these types, unless that has been done."""
        signature = self._signature(args)
        if signature not in self.body.overloads and not self.body._cache.holds(signature):
            compile_elsewhere((self.name, signature), cache.writable())

    def load(self, args: ArgTypes) -> None:
        """Makes its symbol known to LLVM. Code that never runs here gets the address of something else."""
        address = llvm.address_of_symbol("numba_parallel_for")
        if runs_here:
            compiled = self.compile(self._signature(args))
            address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
        llvm.add_symbol(self.symbol(args), address)

    def compile(self, signature: ArgTypes) -> Any:
        """From memory, from disk, or anew."""
        self.body.compile(signature)
        return self.body.overloads[signature]

    @staticmethod
    def _signature(args: ArgTypes) -> ArgTypes:
        return (types.intp, types.intp, *args)


KERNELS: dict[str, Kernel] = {}


def load_kernels(needed: list[tuple[str, ArgTypes]]) -> None:
    """Before code is loaded that calls them: LLVM ends the process over a symbol that it does not know."""
    for name, args in needed:
        KERNELS[name].load(args)


def kernel(**flags: Any) -> Callable[[Callable[..., None]], Any]:
    """Makes a function (begin, stop, *args) a kernel. In compiled code it is called as

        name(count, threaded, (args, ...))

    for tasks 0..count-1: each thread takes a range of neighbouring tasks, or this thread all of them. Raises
    MemoryError if one of the threads has no memory.
    """

    def make(function: Callable[..., None]) -> Any:
        made = KERNELS[function.__name__] = Kernel(function, flags)

        @intrinsic
        def launch(typing, count, threaded, args):  # type: ignore[no-untyped-def]
            plain = tuple(types.unliteral(each) for each in args)
            made.announce(plain)

            def build(context, builder, signature, values):  # type: ignore[no-untyped-def]
                made.load(plain)
                cache.note(made.name, plain, made.symbol(plain))
                count, threaded, packed = values
                parts = cgutils.unpack_tuple(builder, packed)
                parts = [context.cast(builder, *each) for each in zip(parts, args, plain, strict=True)]
                _launch(context, builder, made.symbol(plain), plain, count, threaded, parts)
                return context.get_dummy_value()

            return types.void(types.intp, types.boolean, args), build

        return launch

    return make


def entry(function: Callable[..., Any], name: str | None = None) -> Any:
    """Makes a function that launches kernels callable from Python, and part of whatever compiled function calls it."""
    made = njit(**EXACT, no_cfunc_wrapper=True, inline="always")(function)
    made._cache = cache.DiskCache(name or function.__name__, load_kernels)
    return made


def _launch(context, builder, symbol, args, count, threaded, values):  # type: ignore[no-untyped-def]
    """Calls a kernel for `count` tasks on this thread or on all of them."""
    closure_type = ir.LiteralStructType([I64, I64, I32, *(context.get_value_type(each) for each in args)])
    threads = builder.call(
        cgutils.get_or_insert_function(builder.module, ir.FunctionType(I64, []), "get_num_threads"), []
    )
    ranges = builder.select(threaded, threads, I64(1))
    closure = cgutils.alloca_once(builder, closure_type)
    for at, value in enumerate([count, ranges, I32(0), *values]):
        builder.store(value, cgutils.gep_inbounds(builder, closure, 0, at))
    callback = _callback(context, builder.module, symbol, args, closure_type)
    # numba's pools call back with base + step x range for each argument: with base 0 and step 1, the range's own number
    base, steps, sizes = (cgutils.alloca_once_value(builder, value) for value in (_BYTES(None), I64(1), ranges))
    arguments = base, sizes, steps, builder.bitcast(closure, _BYTES)
    with builder.if_else(threaded) as (shared, alone):
        with shared:
            kind = ir.FunctionType(ir.VoidType(), [_BYTES] * 5 + [I64] * 3)
            run = cgutils.get_or_insert_function(builder.module, kind, "numba_parallel_for")
            pointers = [builder.bitcast(each, _BYTES) for each in (callback, *arguments)]
            builder.call(run, [*pointers, I64(0), I64(1), threads])
        with alone:
            builder.call(callback, arguments)
    failed = builder.load(cgutils.gep_inbounds(builder, closure, 0, 2))
    with builder.if_then(builder.icmp_unsigned("!=", failed, I32(0)), likely=False):
        context.call_conv.return_user_exc(builder, MemoryError, ("no memory for a kernel's own arrays",))


def _callback(context, module, symbol, args, closure_type):  # type: ignore[no-untyped-def]
    """What a thread runs: the kernel on its share of the tasks, with the arguments from the closure."""
    name = f"run.{symbol}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, _CALLBACK, name)
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block())
    bases, sizes, _, raw = function.args
    closure = builder.bitcast(raw, closure_type.as_pointer())
    count, ranges, _, *values = (
        builder.load(cgutils.gep_inbounds(builder, closure, 0, at)) for at in range(3 + len(args))
    )
    first = builder.ptrtoint(builder.load(bases), I64)
    last = builder.add(first, builder.load(sizes))
    begin, stop = (builder.sdiv(builder.mul(count, at), ranges) for at in (first, last))
    kind = context.call_conv.get_function_type(types.none, (types.intp, types.intp, *args))
    body = cgutils.get_or_insert_function(module, kind, symbol)
    with builder.if_then(builder.icmp_signed("<", begin, stop)):
        status, _ = context.call_conv.call_function(
            builder, body, types.none, (types.intp, types.intp, *args), [begin, stop, *values]
        )
        with builder.if_then(status.is_error, likely=False):
            builder.store(I32(1), cgutils.gep_inbounds(builder, closure, 0, 2))
    builder.ret_void()
    return function

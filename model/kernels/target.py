"""This CPU: the instructions it has, and the sizes that follow from them."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm

_FEATURES = llvm.get_host_cpu_features()

WIDE = bool(_FEATURES.get("avx512f"))
LANES = 16 if WIDE else 8  # fp32 numbers in a register
PANEL = 2 * LANES  # outputs of a product that are computed together
GROUP = 64  # inputs that share a scale in int8,
NIBBLES = 32  # and in int4
# bytes that one instruction multiplies and adds up: 4 with VNNI, 2 (as 16 bits) with AVX2, else one by one
DEPTH = 4 if _FEATURES.get("avx512vnni") else 2 if _FEATURES.get("avx2") else 1

# Rows of a tile, as many as the 32 or 16 registers have sums for. Integer products keep the sums of one group beside
# those of all groups.
TILE = 8 if WIDE else 6
TILE_INTEGERS = 6 if WIDE else 3

# fewer rows than this are not worth waking other threads for
FEW = 8

# Every compiled function states its flags, also where they are False: one that does not would take those of its caller.
# FAST lets LLVM reorder sums for SIMD, the same way each time, and keeps NaN and infinity. numpy's error model, since a
# check for division by zero would keep a loop from becoming SIMD.
EXACT: dict[str, Any] = {"fastmath": False, "error_model": "numpy", "nogil": True}
FAST: dict[str, Any] = {**EXACT, "fastmath": {"reassoc", "contract", "nsz", "arcp"}}

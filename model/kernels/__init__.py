"""What the CPU computes, compiled by numba: matrix products, attention, norms, activations, and the whole step.

Each row is computed alone, so its bits depend on no other row, on no thread, and not on how many rows there are.

Compiled on first use for the types that a model has, and kept on disk (`cache`).
"""

import numba

from tokenteller.model.kernels.ahead import compile_ahead
from tokenteller.model.kernels.attention import attend
from tokenteller.model.kernels.elementwise import ACTIVATIONS, activate, norm
from tokenteller.model.kernels.forward import Layer, Model, Workspace, forward_for
from tokenteller.model.kernels.products import Floats, Panels, multiply, multiply_quantised, quantise
from tokenteller.model.kernels.target import DEPTH, GROUP, LANES, NIBBLES, PANEL

# Starts numba's threads: code that is read back from disk takes them for started and crashes if they are not.
numba.get_num_threads()

__all__ = [
    "ACTIVATIONS",
    "DEPTH",
    "GROUP",
    "LANES",
    "NIBBLES",
    "PANEL",
    "Floats",
    "Layer",
    "Model",
    "Panels",
    "Workspace",
    "activate",
    "attend",
    "compile_ahead",
    "forward_for",
    "multiply",
    "multiply_quantised",
    "norm",
    "quantise",
]

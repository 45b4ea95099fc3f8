"""The C kernels (kernels/), bound with ctypes: numpy arrays in, numpy arrays out.

Every array is checked for shape, dtype and contiguity before its address is passed. Rows are split
over threads (ctypes releases the interpreter lock); no result depends on the number of threads,
nor on the instruction set, which is chosen when the library is loaded.
`QTOOL_SIMD=scalar|avx2|avx512|neon` forces one, `QTOOL_LIBRARY` names another build of the library.
"""

from qtool.native.floats import from_bfloat16, from_float16, to_bfloat16, to_float16
from qtool.native.levels import Levels, Points, gptq_sweep_levels
from qtool.native.library import available, default_threads, select, selected
from qtool.native.packing import AWQ_ORDER, dequantize, pack, unpack
from qtool.native.rounding import Groups, RangeSearch, Sweep, gptq_sweep, quantize_groups

__all__ = [
    "AWQ_ORDER",
    "Groups",
    "Levels",
    "Points",
    "RangeSearch",
    "Sweep",
    "available",
    "default_threads",
    "dequantize",
    "from_bfloat16",
    "from_float16",
    "gptq_sweep",
    "gptq_sweep_levels",
    "pack",
    "quantize_groups",
    "select",
    "selected",
    "to_bfloat16",
    "to_float16",
    "unpack",
]

"""PTX of a kernel, by NVRTC with the options that qtool.cuda.compiling has, kept beside its cubins.

cuda-core asks the driver which PTX it could load, and here is none: NVRTC is called as it would.
"""

import os
import tempfile
from functools import lru_cache
from unittest.mock import patch

from qtool.cuda import compiling
from support.ptx.machine import Compiled, compiled
from support.ptx.parse import Module, parse

_CORE = compiling.core  # tests may have put another one there


def _checked(found: tuple[object, ...]) -> tuple[object, ...]:
    status, *rest = found
    if int(status) != 0:  # type: ignore[call-overload]
        raise RuntimeError(f"NVRTC: {status}")
    return tuple(rest)


def compile_ptx(unit: str, source: str, arch: str) -> str:
    with patch.object(compiling, "core", _CORE):
        options = compiling.program_options(unit, arch).as_bytes("nvrtc", "ptx")
    from cuda.bindings import nvrtc

    (program,) = _checked(
        nvrtc.nvrtcCreateProgram(source.encode(), f"{unit}.cu".encode(), 0, [], [])
    )
    _checked(nvrtc.nvrtcCompileProgram(program, len(options), options))
    (size,) = _checked(nvrtc.nvrtcGetPTXSize(program))
    text = b" " * int(size)  # type: ignore[call-overload]
    _checked(nvrtc.nvrtcGetPTX(program, text))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return text.rstrip(b"\0").decode()


def ptx_of(kernel: str, arch: str) -> str:
    """The text of the unit that has a kernel, from disk or compiled now."""
    unit, source = compiling.unit_of(kernel)
    digest = compiling.digest(source, compiling.compiler_version())
    path = compiling.cache_folder() / f"{digest}-{arch}-{unit}.ptx"
    if path.is_file():
        return path.read_text()
    text = compile_ptx(unit, source, arch)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
    return text


@lru_cache(maxsize=4)
def _module(unit: str, kernel: str, arch: str) -> Module:
    return parse(ptx_of(kernel, arch))


@lru_cache(maxsize=24)
def kernel_of(kernel: str, arch: str, arrays: int) -> Compiled:
    """A kernel, ready to run."""
    unit = compiling.unit_of(kernel)[0]
    first = kernel if unit == kernel else f"{unit}_"
    return compiled(_module(unit, first, arch), kernel, arrays)

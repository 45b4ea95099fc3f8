"""Kernels compiled for the GPU at hand, by NVRTC through NVIDIA's cuda-core, and kept on disk.

The sources are package data (kernels/cuda, without any header of CUDA's or torch's). What is kept
is named by the digest of sources, options and compiler, and by the architecture:
cuda/DIGEST-sm_90-UNIT.cubin in QTOOL_CACHE, or in qtool of the user's cache.
"""

import hashlib
import os
import secrets
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import qtool
from qtool.errors import UnsupportedError

EXTRA = "pip install 'qtool[cuda]'"
OPTIONS = ("std=c++17", "fma=false", "ftz=false")
# What the kernels share with those of the CPU; CMakeLists.txt installs the same.
SHARED = (
    "gguf_encode_book_body.h",
    "gguf_encode_iq1_body.h",
    "gguf_encode_k_body.h",
    "gguf_encode_k_symmetric_body.h",
    "gguf_encode_lanes.h",
    "gguf_encode_lattice_body.h",
    "gguf_encode_legacy_body.h",
    "gguf_grids_iq1_iq3.h",
    "gguf_grids_iq2.h",
    "gguf_lane_floats.h",
    "gguf_lattice.h",
    "gguf_near.h",
    "gguf_search.h",
    "grid_body.h",
    "nearest_body.h",
    "small_floats_body.h",
)


@cache
def folders() -> tuple[Path, Path]:
    """Where the headers are: kernels/cuda, and kernels with the tables that the CPU shares."""
    for entry in qtool.__path__:
        kernels = Path(entry) / "kernels"
        if (kernels / "cuda" / "base.h").is_file():
            return kernels / "cuda", kernels
    raise UnsupportedError("the CUDA sources are not installed with this package; install it again")


def sources() -> list[Path]:
    """Every header that a kernel may include."""
    cuda, shared = folders()
    return [*sorted(cuda.glob("*.h")), *(shared / name for name in SHARED)]


_ELF = b"\x7fELF"  # what a cubin begins with


def unit_of(kernel: str) -> tuple[str, str]:
    """What is compiled together with a kernel: a name, and the source.

    One kernel that dequantizes or encodes; those that pack, multiply, measure, or quantize to
    integer grids or small floats, all at once.
    """
    family, _, rest = kernel.partition("_")
    if family == "dequantize":
        name, _, out = rest.rpartition("_")
        return kernel, f'#include "dequantize.h"\nQT_DEQUANTIZE({name}, {out})\n'
    if family == "encode":
        return kernel, f'#include "encode.h"\nQT_ENCODE({rest})\n'
    if family == "measure":
        return family, '#include "encode.h"\nQT_MEASURE_KERNELS(QT_KERNEL)\n'
    if family in ("pack", "gemv", "quantize", "round"):
        return family, f'#include "{family}.h"\nQT_{family.upper()}_KERNELS(QT_KERNEL)\n'
    raise ValueError(f"no kernel is called {kernel!r}")


# While one thread imports a.b, another's `import a.b` may return before `a` has it. What else is
# imported of these packages comes after core().
_IMPORTING = Lock()


def core() -> Any:
    """The module cuda.core; UnsupportedError where the extra is not installed."""
    try:
        with _IMPORTING:
            import cuda.bindings.nvrtc
            import cuda.core
    except ImportError as error:
        raise UnsupportedError(
            f"CUDA kernels are compiled with NVIDIA's cuda-core and NVRTC, and {error.name} is not "
            f"installed: {EXTRA}"
        ) from None
    return cuda.core


def compiler_version() -> str:
    """NVRTC's version; UnsupportedError where the library is not to be found."""
    core()
    from cuda.bindings import nvrtc

    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # cuda-bindings look for the library at the first call
        said = " ".join(str(error).split())[:160]
        raise UnsupportedError(f"NVRTC cannot be loaded ({said}): {EXTRA}") from error
    if int(status) != 0:
        raise UnsupportedError(f"NVRTC does not answer ({status}): {EXTRA}")
    return f"{major}.{minor}"


def architectures() -> tuple[int, ...]:
    """What NVRTC compiles for: 75, 80 ... Empty where it does not say."""
    from cuda.bindings import nvrtc

    status, found = nvrtc.nvrtcGetSupportedArchs()
    return tuple(int(one) for one in found) if int(status) == 0 else ()


def program_options(unit: str, arch: str) -> Any:
    """What every unit is compiled with, for an architecture (sm_90)."""
    return core().ProgramOptions(
        name=f"{unit}.cu",
        arch=arch,
        std="c++17",
        fma=False,
        ftz=False,
        include_path=[str(folder) for folder in folders()],
    )


def compile_source(unit: str, source: str, arch: str) -> bytes:
    """The cubin of a source for an architecture."""
    options = program_options(unit, arch)
    return bytes(core().Program(source, "c++", options).compile("cubin").code)


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    given = os.environ.get("QTOOL_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(given or Path(home) / "qtool") / "cuda"


def digest(source: str, compiler: str) -> str:
    """Of all that a kernel is made from."""
    found = hashlib.sha256("\n".join([compiler, *OPTIONS, source]).encode())
    for path in sources():
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def cubin(kernel: str, arch: str) -> bytes:
    """The code that has a kernel, from disk or compiled now.

    A cache that cannot be written only costs the time to compile again.
    """
    unit, source = unit_of(kernel)
    path = cache_folder() / f"{digest(source, compiler_version())}-{arch}-{unit}.cubin"
    with suppress(OSError):  # there is none, or it is another user's alone
        if (code := path.read_bytes()).startswith(_ELF):
            return code
    code = compile_source(unit, source, arch)
    with suppress(OSError):
        _keep(path, code)
    return code


def _keep(path: Path, code: bytes) -> None:
    """Whole or not at all, whoever else compiles it now, and for all whom the user lets read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with beside.open("xb") as file:
            file.write(code)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise

"""Which qtool is at work: its version, and a digest of its code.

Two builds may have one version: a checkout that has moved on, a package that was made again. Bytes
of both in one artifact are those of neither, so that what one has begun the other does not finish.
"""

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import qtool
from qtool.native.library import library_path

VERSION, CODE = "version of qtool", "code of qtool"
_SUFFIXES = frozenset({".py", ".h", ".cu"})


def facts() -> dict[str, str]:
    """What a run notes of the program that began it."""
    return {VERSION: qtool.__version__, CODE: code()}


@cache
def code() -> str:
    """SHA-256 of the modules, the CUDA sources and the kernel library, by name, in hexadecimal."""
    digest = hashlib.sha256()
    for name, path in sorted(set(_files())):
        digest.update(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n".encode())
    return digest.hexdigest()


def _files() -> Iterator[tuple[str, Path]]:
    """Each under the name that it has in an installed package."""
    package = Path(qtool.__file__).parent
    beside = package if (package / "formats").is_dir() else package.parent  # of a checkout
    roots = {package: "", beside / "formats": "formats", beside / "kernels/cuda": "kernels/cuda"}
    for root, name in roots.items():
        for path in root.rglob("*"):
            if path.suffix in _SUFFIXES and path.is_file():
                yield str(Path(name, path.relative_to(root))), path
    yield "library", library_path()

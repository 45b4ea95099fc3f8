"""A checkpoint as its headers tell it: which tensors exist, in which file, at which bytes.

Opening reads headers and config.json only. A tensor is read when it is asked for, by one ranged
read into a fresh buffer. Python pickles (*.bin, *.pt, *.pth) are never loaded: unpickling runs
whatever code the file holds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from qtool.checkpoints.links import check_links
from qtool.checkpoints.weight_files import (
    NO_WEIGHTS,
    PICKLE_SUFFIXES,
    refused_pickle,
    weight_files,
)
from qtool.errors import FormatError, SourceError, UnsupportedError
from qtool.formats import safetensors_file as st
from qtool.formats.safetensors_file import TensorInfo

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    from qtool.lazy_numpy import np


# What a model needs beside its weights and config.json. A positive list, so that optimizer states
# and other people's outputs in the same folder are not carried along.
SIDE_PATTERNS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template*",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*",
    "preprocessor_config.json",
    "processor_config.json",
    "LICENSE*",
    "NOTICE*",
)
_CHUNK = 1 << 22

Headers = Callable[[Path], tuple[dict[str, TensorInfo], dict[str, str]]]  # see st.read_header


def hash_file(path: Path) -> str:
    """Its SHA-256, in hexadecimal."""
    digest = hashlib.sha256()
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    try:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(view[:count])
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror})") from None
    return digest.hexdigest()


class Watch(Protocol):
    """Is shown what is read: of which file, from which byte on, the bytes."""

    def __call__(self, file: Path, start: int, raw: NDArray[np.uint8]) -> None: ...

    def made(self, name: str, raw: NDArray[np.uint8]) -> None:
        """Bytes of a tensor that a view makes of others, some rows or all."""


@dataclass(frozen=True)
class Checkpoint:
    """Headers and config of a safetensors checkpoint; `tensors` is in the order of the files."""

    path: Path  # what was opened: a folder or one file
    config: Mapping[str, Any]  # {} where there is no config.json
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str] = field(repr=False)
    files: tuple[Path, ...]
    _file_of: Mapping[str, Path] = field(repr=False)
    readable: bool = True  # False: only headers are here
    watch: Watch | None = field(default=None, repr=False, compare=False, kw_only=True)

    @classmethod
    def open(cls, path: Path | str, headers: Headers = st.read_header) -> Checkpoint:
        """Read headers; SourceError or FormatError where anything is missing or contradictory.

        headers: what gives the header of a file, where that is not at its beginning.
        """
        path = Path(path)
        if path.is_dir():
            files, weight_map = weight_files(path)
        elif path.is_file():
            files, weight_map = [path], None
            if path.suffix in PICKLE_SUFFIXES:
                raise refused_pickle(path)
            if path.suffix == ".gguf":
                raise UnsupportedError(f"{path}: a GGUF file; this version reads safetensors")
            if path.suffix in NO_WEIGHTS:
                raise SourceError(
                    f"{path}: not weights; name a model's folder, or a .safetensors or .gguf file"
                )
        else:
            raise SourceError(f"{path}: no such file or folder")
        tensors: dict[str, TensorInfo] = {}
        file_of: dict[str, Path] = {}
        metadata: dict[str, str] = {}
        folder = path if path.is_dir() else path.parent
        for file in files:
            found, its_metadata = headers(file)
            metadata |= its_metadata
            for name, info in sorted(found.items(), key=lambda item: item[1].start):
                if weight_map is not None and weight_map.get(name, file.name) != str(
                    file.relative_to(folder).as_posix()
                ):
                    continue  # a second copy; the index says which one counts
                if name in tensors:
                    raise FormatError(f"{name}: in both {file_of[name].name} and {file.name}")
                tensors[name] = info
                file_of[name] = file
        for name, its_file in (weight_map or {}).items():
            if name not in tensors:
                raise FormatError(f"{folder / its_file}: lacks {name!r}, which the index promises")
        if not tensors:
            raise SourceError(f"{path}: holds no tensors")
        check_links(folder, files, SIDE_PATTERNS)
        config_path = folder / "config.json"
        config = st.read_json(config_path) if config_path.is_file() else {}
        here = headers is st.read_header
        return cls(path, config, tensors, metadata, tuple(files), file_of, here)

    @property
    def folder(self) -> Path:
        """Where the weights lie."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def stored_as(self) -> str | None:
        """How the matrices lie there of what is shown dequantized; None of a plain checkpoint."""
        return None

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences on what is not shown as it lies there."""
        return ()

    @property
    def config_as_stored(self) -> Mapping[str, Any]:
        """What config.json says."""
        return self.config

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._file_of[self._known(name)]

    def _known(self, name: str) -> str:
        if name not in self.tensors:
            raise SourceError(f"{self.path}: has no tensor {name!r}")
        return name

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, uint8 [nbytes]."""
        return self._read(name, self.tensors[self._known(name)])

    def part(self, name: str, first: int, last: int) -> NDArray[np.uint8]:
        """The bytes of a tensor, from `first` to `last` of its leading axis."""
        info = self.tensors[self._known(name)]
        row = info.nbytes // info.shape[0]
        shape = (last - first, *info.shape[1:])
        start, end = info.start + first * row, info.start + last * row
        return self._read(name, TensorInfo(name, info.dtype, shape, start, end))

    def stretch(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of a tensor from `start` to `stop`."""
        info = self.tensors[self._known(name)]
        first, last = info.start + start, info.start + stop
        return self._read(name, TensorInfo(name, info.dtype, info.shape, first, last))

    def _read(self, name: str, where: TensorInfo) -> NDArray[np.uint8]:
        file = self.file_of(name)
        raw = st.read_range(file, where)
        if self.watch is not None:
            self.watch(file, where.start, raw)
        return raw

    def _stretch_of_part(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The same of what a view makes by whole rows."""
        info = self.tensors[name]
        row = info.nbytes // info.shape[0]
        first = start // row
        rows = self.part(name, first, max(first, -(-stop // row)))
        return rows[start - first * row : stop - first * row]

    def array(self, name: str) -> NDArray[Any]:
        """A tensor in its numpy dtype; BF16 as uint16."""
        info = self.tensors[self._known(name)]
        return st.as_array(self.raw(name), info.dtype, info.shape)

    def float32(self, name: str) -> NDArray[np.float32]:
        """A float tensor as float32, of its own shape."""
        info = self.tensors[self._known(name)]
        try:
            return st.to_float32(self.raw(name), info.dtype, info.shape)
        except UnsupportedError as error:
            raise UnsupportedError(f"{name}: {error}") from None

    @cached_property
    def file_digests(self) -> Mapping[str, str]:
        """SHA-256 of each weight file, by name, and of the config as config.json. Reads all."""
        named = {file.name: hash_file(file) for file in self.files}
        canonical = json.dumps(self.config, sort_keys=True, separators=(",", ":"))
        return dict(sorted(named.items())) | {
            "config.json": hashlib.sha256(canonical.encode()).hexdigest()
        }

    @cached_property
    def _digest(self) -> str:
        lines = [f"{digest}  {name}\n" for name, digest in self.file_digests.items()]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def digest(self) -> str:
        """SHA-256 over the digests of the weight files, by name, and of the config. Reads all."""
        return self._digest

    @property
    def side_files(self) -> tuple[Path, ...]:
        """Tokenizer, generation config, chat template and the like, relative to the folder."""
        patterns: tuple[str, ...] = SIDE_PATTERNS
        if "auto_map" in self.config:  # the model's own code, which engines may ask for
            patterns += ("*.py",)
        found = {p for pattern in patterns for p in self.folder.glob(pattern) if p.is_file()}
        return tuple(sorted(p.relative_to(self.folder) for p in found))


@dataclass(frozen=True)
class View(Checkpoint):
    """A checkpoint that is shown otherwise than it lies there, as a recipe or an option says."""

    source: Checkpoint | None = field(default=None, repr=False)

    @property
    def original(self) -> Checkpoint:
        """What it is a view of."""
        assert self.source is not None
        return self.source

    @property
    def stored_as(self) -> str | None:
        """As of what it is a view of."""
        return self.original.stored_as

    @property
    def remarks(self) -> tuple[str, ...]:
        """Likewise."""
        return self.original.remarks

    @property
    def config_as_stored(self) -> Mapping[str, Any]:
        """Likewise."""
        return self.original.config_as_stored

    @property
    def file_digests(self) -> Mapping[str, str]:
        """Likewise: they tell the source, whatever is made of it."""
        return self.original.file_digests

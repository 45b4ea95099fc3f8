"""What a GGUF file is, told from its header: a model, an importance matrix or an adapter.

Only `--tensor` reads weights, and that of one tensor; of an importance matrix the token counts are
read, a few numbers an entry. Metadata of an unexpected kind is shown as it is, never believed.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from qtool.errors import FormatError, SourceError
from qtool.formats.gguf_arrays import StoredArray
from qtool.formats.gguf_file import INTEGERS, GgufFile
from qtool.formats.gguf_header import TensorInfo
from qtool.formats.gguf_values import Kind, Value
from qtool.gguf_types import BY_NAME, F32

_SPECIAL = re.compile(r"tokenizer\.ggml\.(\w+)_token_id")
COUNTS = ".counts"  # an entry of an importance matrix has this tensor and one of sums
_MAX_COUNTS = 1 << 18


@dataclass(frozen=True)
class GgufInspection:
    """An opened file and its totals."""

    file: GgufFile

    @property
    def parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(info.size for info in self.file.tensors.values())

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.file.tensors.values())

    @property
    def bits_per_weight(self) -> float:
        """Bits stored for each number."""
        return 8 * self.tensor_bytes / self.parameters if self.parameters else 0.0

    @property
    def unquantized_share(self) -> float:
        """Share of the numbers that are stored as plain floats or integers."""
        dense = sum(i.size for i in self.file.tensors.values() if i.type.name not in BY_NAME)
        return dense / self.parameters if self.parameters else 0.0

    @property
    def kind(self) -> str:
        """general.type: model, imatrix, adapter, mmproj, ..."""
        return self.text("general.type") or "model"

    @cached_property
    def file_type(self) -> str | None:
        """general.file_type by its name."""
        from qtool.gguf_mixtures.table import FILE_TYPES, MOSTLY_NVFP4

        number = self.integer("general.file_type")
        names = {kind.number: name for name, kind in FILE_TYPES.items()} | {MOSTLY_NVFP4: "NVFP4"}
        return None if number is None else names.get(number, f"unknown ({number})")

    def text(self, key: str) -> str | None:
        """The string of this key, None for anything else."""
        value = self.file.metadata.get(key)
        return value.value if value is not None and value.kind is Kind.STRING else None

    def integer(self, key: str) -> int | None:
        """The integer of this key, None for anything else."""
        value = self.file.metadata.get(key)
        return int(value.value) if value is not None and value.kind in INTEGERS else None

    def length(self, key: str) -> int | None:
        """How many elements the array of this key has, None for anything else."""
        value = self.file.metadata.get(key)
        return len(value.value) if value is not None and value.kind is Kind.ARRAY else None

    @cached_property
    def tokenizer(self) -> dict[str, Any] | None:
        """Model, pre-tokenizer, counts, special tokens and the length of the chat template."""
        metadata = self.file.metadata
        model, count = self.text("tokenizer.ggml.model"), self.length("tokenizer.ggml.tokens")
        if model is None and count is None:
            return None
        ids = {
            found[1]: number
            for key in metadata
            if (found := _SPECIAL.fullmatch(key)) and (number := self.integer(key)) is not None
        }
        template = self.text("tokenizer.chat_template")
        return {
            "model": model,
            "pre": self.text("tokenizer.ggml.pre"),
            "tokens": count,
            "merges": self.length("tokenizer.ggml.merges"),
            "special": {
                name: {"id": number, "token": token}
                for (name, number), token in zip(ids.items(), self._tokens(ids), strict=True)
            },
            "chat_template_characters": None if template is None else len(template),
        }

    def _tokens(self, ids: Mapping[str, int]) -> list[str | None]:
        """The text of some tokens, found in one pass over the vocabulary."""
        value = self.file.metadata.get("tokenizer.ggml.tokens")
        tokens = value.value if value is not None else None
        if not isinstance(tokens, StoredArray) or tokens.kind is not Kind.STRING:
            return [None] * len(ids)
        raw = tokens.raw_strings_at(number for number in ids.values() if 0 <= number < len(tokens))
        found = {number: token.decode("utf-8", "surrogateescape") for number, token in raw.items()}
        return [found.get(number) for number in ids.values()]

    def keys_under(self, prefix: str) -> dict[str, Any]:
        """Metadata below a prefix, without it; long arrays abbreviated."""
        return {
            key.removeprefix(prefix): plain(value)
            for key, value in self.file.metadata.items()
            if key.startswith(prefix)
        }

    def types(self) -> list[dict[str, Any]]:
        """What is stored in each type, the largest first."""
        groups: dict[str, list[TensorInfo]] = {}
        for info in self.file.tensors.values():
            groups.setdefault(info.type.name, []).append(info)
        rows = [
            {
                "type": name,
                "tensors": len(members),
                "weights": sum(info.size for info in members),
                "bytes": sum(info.nbytes for info in members),
                "bits_per_weight": members[0].type.bits_per_weight,
            }
            for name, members in groups.items()
        ]
        return sorted(rows, key=lambda row: -row["bytes"])

    @cached_property
    def importance_entries(self) -> dict[str, list[float]]:
        """Of an importance matrix: token counts of each entry, one number an expert; no counts
        where tensors cannot be read."""
        infos = {
            name.removesuffix(COUNTS): info
            for name, info in self.file.tensors.items()
            if name.endswith(COUNTS) and info.type is F32
        }
        if sum(info.size for info in infos.values()) > _MAX_COUNTS:
            raise FormatError(
                f"{self.file.path}: more than {_MAX_COUNTS} token counts; expected one for each "
                "matrix or expert"
            )
        entries: dict[str, list[float]] = {}
        for name, info in infos.items():
            if not self.file.readable:
                entries[name] = []
                continue
            raw = bytearray(info.nbytes)
            self.file.read_into(info.name, 0, memoryview(raw))
            entries[name] = list(struct.unpack(f"<{info.size}f", raw))
        return entries

    def json(self) -> dict[str, Any]:
        """The --json object."""
        file = self.file
        found = {
            "format": "gguf",
            "quant_method": None,
            "version": file.version,
            "kind": self.kind,
            "architecture": self.text("general.architecture"),
            "name": self.text("general.name"),
            "file_type": self.file_type,
            "files": [path.name for path in file.files],
            "bits_per_weight": self.bits_per_weight,
            "size_bytes": file.size_bytes,
            "parameters": self.parameters,
            "unquantized_share": self.unquantized_share,
            "types": self.types(),
            "tokenizer": self.tokenizer,
            "importance": self.keys_under("quantize.imatrix.") or None,
            "provenance": self.keys_under("qtool.") or None,
            "metadata": self.keys_under(""),
            "tensors": [tensor_row(info) for info in file.tensors.values()],
        }
        if self.kind == "imatrix":
            found["entries"] = {
                name: [number(count) for count in counts]
                for name, counts in self.importance_entries.items()
            }
        return found


def number(value: Any) -> Any:
    """A number that JSON can say; infinities and NaN become words."""
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def plain(value: Value) -> Any:
    """A value for JSON; an array of more than 8 elements becomes its count and first elements."""
    if value.kind is not Kind.ARRAY:
        return number(value.value)
    array = value.value
    if len(array) <= 8:
        return [number(element) for element in array]
    first = array.first(4) if isinstance(array, StoredArray) else array[:4]
    element = value.element.name.lower() if value.element is not None else None
    return {"kind": element, "count": len(array), "first": [number(item) for item in first]}


def tensor_row(info: TensorInfo) -> dict[str, Any]:
    """One tensor, as --json has it."""
    return {
        "name": info.name,
        "shape": list(info.shape),
        "dtype": info.type.name,
        "scheme": info.type.name if info.type.name in BY_NAME else None,
        "bits_per_weight": info.type.bits_per_weight,
        "bytes": info.nbytes,
    }


def tensor_detail(file: GgufFile, name: str) -> dict[str, Any]:
    """One tensor, read: its row, its place, and what its weights are like."""
    from qtool.gguf.statistics import histograms, second_scales, statistics

    info = file.tensors.get(name)
    if info is None:
        end = name.rsplit(".", 2)[-2:]
        like = [other for other in file.tensors if other.rsplit(".", 2)[-2:] == end][:3]
        hint = f"; there is {', '.join(like)}" if like else "; `qtool inspect --all` lists them"
        raise SourceError(f"{file.path}: has no tensor {name!r}{hint}")
    place = {"file": info.file.name, "offset": info.start}
    found = statistics(file, info)
    if (factors := second_scales(file, info)) is not None:
        found["second_scale_range"] = [float(factors.min()), float(factors.max())]
    return tensor_row(info) | place | found | histograms(file, info, found)

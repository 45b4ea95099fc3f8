"""Names under which llama.cpp's `-hf OWNER/NAME:QUANT` finds GGUF files.

    NAME-QUANT.gguf, NAME-QUANT-00001-of-00003.gguf      QUANT in capitals, such as Q4_K_M

The repository's name may end in -GGUF, which its files' names do not.
Source: llama.cpp, common/arg.cpp (-hf); the hub's documentation of GGUF repositories.
"""

import re
from pathlib import Path

from qtool.formats.gguf_file import GgufFile
from qtool.gguf.inspect import GgufInspection

_PART = re.compile(r"-\d{5}-of-\d{5}$", re.ASCII)


def quant_of(path: Path) -> str | None:
    """The QUANT of a file, by what its metadata says it is; None where it does not."""
    with GgufFile.open(path) as file:
        found = GgufInspection(file).file_type
    if found is None or found.startswith("unknown"):
        return None
    return found.removeprefix("MOSTLY_").removeprefix("ALL_").upper()


def names_for(path: Path, repository: str) -> dict[str, Path]:
    """Names in a repository, and the files here, of a model by its first file."""
    with GgufFile.open(path) as file:
        files = list(file.files)
    quant = quant_of(path)
    base = re.sub(r"[-_.]gguf$", "", repository.rpartition("/")[2], flags=re.IGNORECASE)
    if quant is not None and not base.upper().endswith(quant):
        base = f"{base}-{quant}"
    named = {}
    for one in files:
        part = _PART.search(one.stem)
        named[f"{base}{'' if part is None else part[0]}.gguf"] = one
    return named

"""Which files of a folder hold a model's weights."""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from qtool.errors import FormatError, QtoolError, SourceError, UnsupportedError
from qtool.formats import safetensors_file as st

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
NO_WEIGHTS = (".json", ".jsonl", ".txt", ".md", ".py", ".yaml", ".yml", ".jinja", ".model")
_LONGEST_NAME = 255  # bytes, on common file systems


def refused_pickle(path: Path) -> SourceError:
    """What is to be raised for one."""
    return SourceError(
        f"{path}: a Python pickle, which can run any code when loaded and is therefore refused; "
        "convert it once, where you trust it, with transformers: "
        "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OUT), "
        "which writes safetensors, and copy the tokenizer's files to OUT"
    )


def _index_path(folder: Path) -> Path | None:
    """The index file of a sharded checkpoint, or None."""
    usual = folder / st.INDEX_NAME
    if usual.is_file():
        return usual
    others = sorted(folder.glob("*.safetensors.index.json"))
    if len(others) > 1:
        names = ", ".join(p.name for p in others)
        raise SourceError(f"{folder}: several indexes ({names}); keep one")
    return others[0] if others else None


def read_index(path: Path) -> dict[str, str]:
    """The weight map: tensor name to file name, each inside the folder."""
    weight_map = st.read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{path}: has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise FormatError(f"{path}: the file of {name!r} is {file!r}, not a name")
        # Only the written path counts: in a download cache the files are links to elsewhere.
        pure = PurePosixPath(file)
        if pure.is_absolute() or ".." in pure.parts or "\\" in file or "\0" in file or not file:
            raise FormatError(f"{path}: {file!r} leads out of the folder")
        if any(len(part.encode()) > _LONGEST_NAME for part in pure.parts):
            raise FormatError(f"{path}: {file!r} is longer than a file's name can be")
        if not file.endswith(".safetensors"):
            raise (
                refused_pickle(path.parent / file)
                if file.endswith(PICKLE_SUFFIXES)
                else FormatError(f"{path}: {file!r} is no safetensors file")
            )
    return weight_map


MATRIX = "matrix.json"  # in a folder of several artifacts


def refuse_matrix(folder: Path) -> None:
    """SourceError where a folder is that of several artifacts."""
    if is_matrix(folder):
        inner = [path.parent.name for path in folder.glob("*/config.json")]
        names = sorted([*inner, *(path.name for path in folder.glob("*.gguf"))])
        names = [name for name in names if not name.startswith(".")]
        some = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        raise SourceError(
            f"{folder}: what `qtool matrix` made; name one of its artifacts"
            + (f": {some}" if names else "")
        )


def is_matrix(folder: Path) -> bool:
    """Whether `qtool matrix` made it."""
    try:
        return "artifacts" in st.read_json(folder / MATRIX)
    except QtoolError:
        return False


def weight_files(folder: Path) -> tuple[list[Path], Mapping[str, str] | None]:
    """The weight files of a folder, and the weight map where an index gives one."""
    single = folder / "model.safetensors"
    index = _index_path(folder)
    if index is not None:
        weight_map = read_index(index)
        files = [folder / name for name in sorted(set(weight_map.values()))]
        for file in files:
            if not file.is_file():
                raise SourceError(f"{file}: named by {index.name}, but missing; fetch it again")
        return files, weight_map
    if single.is_file():
        return [single], None
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found, None
    if found:
        raise SourceError(
            f"{folder}: {len(found)} safetensors files and no {st.INDEX_NAME} that says which "
            "belong together; fetch the index too, or name one file"
        )
    pickles = sorted(p for s in PICKLE_SUFFIXES for p in folder.glob(f"*{s}"))
    if pickles:
        raise refused_pickle(pickles[0])
    refuse_matrix(folder)
    if any(folder.glob("*.gguf")):
        raise UnsupportedError(f"{folder}: holds GGUF files; this version reads safetensors")
    inner = sorted({path.parent.name for path in folder.glob("*/*.safetensors")})
    meant = f"; did you mean {folder / inner[0]}?" if len(inner) == 1 else ""
    raise SourceError(f"{folder}: no *.safetensors file here; expected a model folder{meant}")

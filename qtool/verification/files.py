"""Whether the files of a safetensors folder are whole and belong together.

Every shard is looked at by itself, so that one broken file does not hide the next.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from qtool.errors import QtoolError
from qtool.formats import safetensors_file as st
from qtool.formats.safetensors_header import TensorInfo
from qtool.messages.sentences import count as counted
from qtool.messages.sentences import some
from qtool.verification.finding import Finding

CHECK = "files"
SINGLE = "model.safetensors"
_INDEX = ".index.json"
_MISTRAL = "consolidated"  # how Mistral's own files begin
_OWN_NAME = "transformers_weights"  # in config.json, a file of another name
_MLX = "quantization"  # in config.json, of what mlx-lm reads, whatever it is called
_PART = re.compile(r"-\d+-of-(\d{1,9})[.]safetensors$")


def check_files(path: Path) -> Iterator[Finding]:
    """Findings about the weight files of a folder, or about one file."""
    if not path.is_dir():
        yield from _read(path)[1]
        return
    files, indexes = _files_in(path)
    if len(indexes) != 1:
        for file in files:
            yield from _read(file)[1]
        if path / SINGLE in files:
            for stray in files:
                if stray.name != SINGLE and not stray.name.startswith(_MISTRAL):
                    yield Finding(
                        "warning", CHECK, stray.name,
                        f"{stray.name} lies beside {SINGLE}, and no index names it; engines that "
                        "load every file would load it too: remove it, or write an index",
                    )  # fmt: skip
        elif (name := _unnamed_of(files, indexes)) is not None:
            yield _unnamed(name)
        return
    yield from _check_index(path, indexes[0], files)


def _files_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """Of weights, and indexes of them."""
    files, indexes = (sorted(folder.glob(f"*.safetensors{end}")) for end in ("", _INDEX))
    return files, indexes


def unnamed(folder: Path) -> str | None:
    """The one file of weights where transformers does not find it, which has no name of its own and
    is not named by config.json; None where it does."""
    return _unnamed_of(*_files_in(folder))


def _unnamed_of(files: Sequence[Path], indexes: Sequence[Path]) -> str | None:
    if len(files) != 1 or files[0].name == SINGLE or indexes:
        return None
    (file,) = files
    try:
        config = st.read_json(file.with_name("config.json"))
    except QtoolError:
        config = {}  # which is told where the config is read
    known = _OWN_NAME in config or _MLX in config or file.name.startswith(_MISTRAL)
    return None if known else file.name


def _unnamed(name: str) -> Finding:
    if (part := _PART.search(name)) is not None and int(part[1]) > 1:
        words = (
            f"{name} is one file of {int(part[1])} by its name, and the others are not there: "
            "fetch them, and their index"
        )
    else:
        words = (
            f"{name} is not called {SINGLE}, so that transformers does not find the weights: "
            "rename it"
        )
    return Finding("warning", CHECK, name, words)


def _read(file: Path) -> tuple[dict[str, TensorInfo], list[Finding]]:
    try:
        return st.read_header(file)[0], []
    except QtoolError as error:
        return {}, [Finding("error", CHECK, file.name, str(error))]


def _check_index(folder: Path, index: Path, files: Sequence[Path]) -> Iterator[Finding]:
    try:
        weight_map = st.read_json(index).get("weight_map")
    except QtoolError as error:
        yield Finding("error", CHECK, index.name, str(error))
        return
    if not isinstance(weight_map, dict) or not weight_map:
        yield Finding("error", CHECK, index.name, f"{index.name} has no weight_map")
        return
    named = {str(file) for file in weight_map.values()}
    there: dict[str, set[str]] = {}
    for file in sorted(named):
        if not (folder / file).is_file():
            number = sum(1 for other in weight_map.values() if other == file)
            yield Finding(
                "error", CHECK, file,
                f"{index.name} names {file} for {counted(number, 'tensor')}, but there is no such "
                "file; "
                "fetch it again",
            )  # fmt: skip
            continue
        tensors, findings = _read(folder / file)
        yield from findings
        if not findings:
            there[file] = set(tensors)
    yield from _elsewhere(index.name, weight_map, there)
    for file, names in there.items():
        extra = [name for name in sorted(names) if weight_map.get(name) != file]
        unknown = [name for name in extra if name not in weight_map]
        if unknown:
            yield Finding(
                "error", CHECK, file,
                f"{file} holds {counted(len(unknown), 'tensor')} that {index.name} does not name "
                f"(the first: {unknown[0]}); engines that follow the index lose them",
            )  # fmt: skip
        twice = [name for name in extra if name in there.get(str(weight_map.get(name)), ())]
        if twice:
            yield Finding(
                "warning", CHECK, file,
                f"{file} holds {counted(len(twice), 'tensor')} that {index.name} gives to another "
                "file, "
                f"which has the same (the first: {twice[0]}); remove one copy",
            )  # fmt: skip
    for stray in files:
        if stray.name == SINGLE and SINGLE not in named and index.name == SINGLE + _INDEX:
            yield Finding(
                "warning", CHECK, SINGLE,
                f"{SINGLE} lies beside {index.name}, which does not name it: transformers reads "
                "the one, and vLLM the files that are named; remove what is not the model",
            )  # fmt: skip
        elif stray.name not in named:
            yield Finding(
                "warning", CHECK, stray.name,
                f"{stray.name} lies in the folder, but {index.name} does not name it; engines "
                "that load every file would load it too: remove it, or add it to the index",
            )  # fmt: skip


def _elsewhere(
    index: str, weight_map: Mapping[str, object], there: Mapping[str, set[str]]
) -> Iterator[Finding]:
    """Tensors that are not in the file that the index gives them to. there: those of each file."""
    given = {name: str(file) for name, file in weight_map.items() if str(file) in there}
    wrong = [name for name, file in given.items() if name not in there[file]]
    lies_in = {name: file for file, names in there.items() for name in names}
    lost = [name for name in wrong if name not in lies_in]
    if lost:
        yield Finding(
            "error", CHECK, lost[0],
            f"{index} names {counted(len(lost), 'tensor')} that no file has: {some(lost)}; engines "
            "that follow the index cannot load the model: fetch its files again",
        )  # fmt: skip
    moved = [name for name in wrong if name in lies_in]
    if moved:
        first, more = moved[0], moved[1:]
        pair = {given[first], lies_in[first]}
        every = [name for name, file in given.items() if file in pair]
        exchanged = moved == every and all(lies_in[name] in pair for name in moved)
        yield Finding(
            "error", CHECK, first,
            f"{index} says that {first} is in {given[first]}, but it lies in {lies_in[first]}"
            + (f", and likewise of {counted(len(more), 'tensor')} more: {some(more)}" * bool(more))
            + "; engines that follow the index cannot load the model: "
            + ("exchange the names of these two files" if exchanged and more else
               "correct the index, or fetch it again"),
        )  # fmt: skip

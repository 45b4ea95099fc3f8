"""Tensors that lie in another file than the index says are told in one sentence."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from qtool.verification.files import check_files

FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
TENSORS = {FILES[0]: ("a", "b", "c"), FILES[1]: ("d", "e")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for file, names in TENSORS.items():
        save_file({name: np.zeros(4, np.float32) for name in names}, tmp_path / file)
    index({name: file for file, names in TENSORS.items() for name in names}, tmp_path)
    assert not list(check_files(tmp_path))
    return tmp_path


def index(weight_map: dict[str, str], folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def only(folder: Path) -> str:
    (found,) = check_files(folder)
    assert (found.severity, found.check) == ("error", "files")
    return found.message


def test_files_with_each_other_s_name(folder: Path) -> None:
    first, second = (folder / file for file in FILES)
    first.rename(folder / "x")
    second.rename(first)
    (folder / "x").rename(second)
    said = only(folder)
    assert said.startswith(f"{INDEX} says that a is in {FILES[0]}, but it lies in {FILES[1]}, and ")
    assert "likewise of 4 tensors more: b, c, d and 1 more; " in said
    assert said.endswith("exchange the names of these two files")


def test_an_index_that_is_wrong_in_some(folder: Path) -> None:
    index(dict.fromkeys("abd", FILES[0]) | dict.fromkeys("ce", FILES[1]), folder)
    said = only(folder)
    assert "likewise of 1 tensor more: c; " in said
    assert said.endswith("correct the index, or fetch it again")


def test_tensors_that_no_file_has(folder: Path) -> None:
    index(dict.fromkeys("abcx", FILES[0]) | dict.fromkeys("dey", FILES[1]), folder)
    assert only(folder).startswith(f"{INDEX} names 2 tensors that no file has: x, y; ")

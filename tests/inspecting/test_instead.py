"""What lies in place of a file, and settings that make no sense: told with file and advice."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from qtool.artifacts.artifact import Artifact
from qtool.errors import FormatError, QtoolError, UnsupportedError
from qtool.formats.gguf_file import GgufFile
from qtool.formats.safetensors_file import parse_json, read_header
from support.runs import quantizing
from support.verification.verifying import serious

PAGE = b"\n<!DOCTYPE html><html><body>404</body></html>\n"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345678\n"
REFUSAL = b'{"error": "Invalid username or password."}'
READERS: dict[str, Callable[[Path], object]] = {
    "m.safetensors": read_header,
    "m.gguf": GgufFile.open,
    "config.json": lambda path: parse_json(path.read_bytes(), str(path)),
}


@pytest.mark.parametrize("file", READERS)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            PAGE,
            "a web page, not the file itself; download it again, and log in where that is asked",
        ),
        (b"\xef\xbb\xbf<?xml version='1.0'?><Error/>", "a web page, not the file itself; "),
        (POINTER, "a pointer of Git LFS, not the file itself; run `git lfs pull` there"),
        (b"", "fetch it again"),
    ],
)
def test_another_file(file: str, content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.write_bytes(content)
    with pytest.raises(FormatError) as error:
        READERS[file](path)
    assert str(error.value).startswith(f"{path}: ") and said in str(error.value)


@pytest.mark.parametrize("file", ["m.safetensors", "m.gguf"])
def test_a_refusal(file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(REFUSAL)
    with pytest.raises(FormatError, match="JSON, such as a server's refusal, not the file itself"):
        READERS[file](tmp_path / file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": [1,\n', "it ends in the middle, at line 2: fetch it again"),
        ('{"a": "b', "it ends in the middle, at line 1: fetch it again"),
        ('{"a": tru', "it ends in the middle, at line 1: fetch it again"),
        ('{"a": 1,}', "line 1 column 9"),
        ("\ufeff{}", "it begins with the mark of UTF-8, which JSON has not: save it without"),
    ],
)
def test_broken_json(text: str, said: str) -> None:
    with pytest.raises(FormatError) as error:
        parse_json(text.encode(), "config.json")
    assert str(error.value).startswith("config.json: not valid JSON (") and said in str(error.value)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    model = quantizing.first_blocks_of_tiny(root / "model", 1)
    for name, recipe in {"awq": "w4g128-rtn", "gptq": "w4g128-gptq", "ct": "w8a16-ct"}.items():
        quantizing.quantize(model, recipe, root / name, *("method=rtn",) * (name == "gptq"))
        (root / name / "qtool.json").unlink()
    return root


def changed(folder: Path, out: Path, keys: tuple[str, ...], value: object) -> Path:
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    *tables, last = keys
    table = config["quantization_config"]
    for key in tables:
        table = table[key]
    table[last] = value
    (out / "config.json").write_text(json.dumps(config))
    return out


BACK = "; put back what the artifact was made with"


@pytest.mark.parametrize(
    ("kind", "keys", "value", "said"),
    [
        ("awq", ("bits",), None, "bits is null; expected 2 to 8"),
        ("gptq", ("bits",), True, "bits is true; expected 2 to 8"),
        ("gptq", ("group_size",), "128", 'group_size is "128"; expected -1 to 16777216'),
        ("awq", ("version",), "exllama",
         'awq version "exllama" is not known; there are gemm, gemv, gemv_fast, llm_awq'),
        ("ct", ("config_groups", "group_0", "weights", "strategy"), True,
         "config_groups.group_0.weights.strategy is true; expected one of tensor, channel, group, "
         "block, tensor_group"),
    ],
)  # fmt: skip
def test_a_setting_without_a_sense(
    kind: str, keys: tuple[str, ...], value: object, said: str, made: Path, tmp_path: Path
) -> None:
    folder = changed(made / kind, tmp_path / "out", keys, value)
    with pytest.raises(FormatError) as error:
        Artifact.open(folder)
    assert str(error.value) == f"{folder}/config.json: quantization_config: {said}{BACK}"


def test_a_setting_of_the_file_beside(made: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(made / "awq", tmp_path / "out"))
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    side = json.loads((out / "quant_config.json").read_text())
    (out / "quant_config.json").write_text(json.dumps(side | {"w_bit": "4", "quant_method": "awq"}))
    with pytest.raises(FormatError) as error:
        Artifact.open(out)
    assert str(error.value) == f'{out}/quant_config.json: bits is "4"; expected 2 to 8{BACK}'


def test_a_module_is_told_with_its_path(made: Path, tmp_path: Path) -> None:
    """verify, which says the path at its end, has it without."""
    folder = changed(made / "awq", tmp_path / "out", ("group_size",), 64)
    start = "model.layers.0.mlp.down_proj.qzeros: the shape is "
    with pytest.raises(QtoolError) as error:
        _ = Artifact.open(folder).entries
    assert str(error.value).startswith(f"{folder}: {start}")
    assert not any(str(folder) in finding.message for finding in serious(folder))


def test_what_no_matrix_is_read_for_is_told_once(made: Path, tmp_path: Path) -> None:
    folder = changed(made / "gptq", tmp_path / "out", ("checkpoint_format",), "marlin")
    (found,) = [f for f in serious(folder) if f.check == "shapes"]
    said = 'checkpoint_format "marlin" is not known; there are gptq and gptq_v2'
    assert found.message.startswith("7 matrices (") and found.message.endswith(said)
    name = "model.layers.0.mlp.down_proj"
    with pytest.raises(UnsupportedError) as error:
        Artifact.open(folder).read(f"{name}.weight")
    assert str(error.value) == f"{folder}: {name}: {said}"

"""The types that llama.cpp's own tests expect of twelve published models, for every file type.

Its tests/snapshots/*.schema list, for each file type, the tensors that do not get the default
type. Shapes are fetched from the hub there and rebuilt from published facts here.

QTOOL_ORACLE_LLAMA_SOURCE names the source tree of llama.cpp 0c1e57098.
"""

import os
import re
from pathlib import Path

import pytest
from oracle.published_models import MODELS

from qtool.gguf_mixtures.rules import Options, choose
from qtool.gguf_mixtures.table import FILE_TYPES

pytestmark = pytest.mark.oracle

Sections = dict[str, tuple[str, dict[str, str]]]


def snapshot(model: str) -> tuple[dict[str, int], Sections]:
    """What the file says of the model, and by file type: the default, and what differs from it."""
    source = os.environ.get("QTOOL_ORACLE_LLAMA_SOURCE")
    if not source:
        pytest.skip("QTOOL_ORACLE_LLAMA_SOURCE is not set: it names llama.cpp's source tree")
    text = (Path(source) / "tests" / "snapshots" / f"{model}.schema").read_text()
    facts = {key: int(value) for key, value in re.findall(r"(n_\w+)=(\d+)", text)}
    sections: Sections = {}
    for part in re.split(r"^\[", text, flags=re.MULTILINE)[1:]:
        head, *lines = part.split("\n")
        name, default = head.split("] ")
        others = dict(line.rsplit(" ", 1) for line in lines if line)
        sections[name] = (default.upper(), {key: type_.upper() for key, type_ in others.items()})
    return facts, sections


@pytest.mark.parametrize("name", MODELS)
def test_types_are_those_of_the_snapshot(name: str) -> None:
    said, sections = snapshot(name)
    model = MODELS[name]
    tensors = model.tensors()
    assert (said["n_embd"], said["n_layer"]) == (model.hidden, model.layers)
    assert (said["n_head"], said["n_head_kv"]) == (model.heads, model.heads_kv)
    assert said.get("n_expert", 0) == model.experts
    # All file types but the two that llama.cpp's test does not know.
    assert set(sections) == set(FILE_TYPES) - {"Q1_0", "Q2_0"}
    # No tensor is missing: in this file type, all that are no experts differ from the default.
    flat = {tensor.name for tensor in tensors if len(tensor.shape) == 2}
    assert set(sections["MXFP4_MOE"][1]) == flat
    compared = 0
    for file_type, (default, others) in sections.items():
        assert FILE_TYPES[file_type].default.name == default
        choices = choose(model.facts, tensors, Options(FILE_TYPES[file_type]), imatrix=False)
        assert set(others) <= set(choices)
        found = {key: choice.type.name for key, choice in choices.items()}
        expected = {key: others.get(key, default) for key in choices}
        wrong = {key: (found[key], type_) for key, type_ in expected.items() if found[key] != type_}
        assert not wrong, f"{file_type}: found, expected: {wrong}"
        compared += len(expected)
    print(f"{name}: {compared} tensors compared in {len(sections)} file types")
    assert compared == len(tensors) * len(sections)

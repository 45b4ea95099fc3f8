"""Small artifacts as `qtool verify` looks at them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from qtool.artifacts.artifact import Artifact
from qtool.scheme import Scheme
from qtool.verification.subject import Subject, subject_of
from support.formats.artifact_files import random_quant, write_folder

LAYER = "model.layers.0"
Q, GATE = f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.gate_proj"


def subject(folder: Path) -> Subject:
    return subject_of(folder, Artifact.open(folder), None)


def folder_of(tmp_path: Path, kind: str, **config: Any) -> Subject:
    """Two matrices of 4 bits; `config` is put over the quantization_config."""
    quants = {name: random_quant(Scheme(4, 32, False), 64, 64) for name in (Q, GATE)}
    out = tmp_path / "out"
    out.mkdir()
    write_folder(out, kind, quants, {"lm_head.weight": np.zeros((8, 64), np.float16)})
    whole = json.loads((out / "config.json").read_text())
    whole["quantization_config"] |= config
    (out / "config.json").write_text(json.dumps(whole))
    return subject(out)

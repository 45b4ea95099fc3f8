"""Settings that say the same in other words, as libraries leave them, are no findings."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from qtool import tiny
from qtool.verification.run import verify_artifact

TINY = Path(tiny.__file__).parent


@pytest.mark.parametrize(
    ("there", "here", "found"),
    [
        ({"use_sliding_window": False, "sliding_window": 4096}, {"sliding_window": None}, []),
        ({"use_sliding_window": True, "sliding_window": 4096}, {"sliding_window": None}, ["error"]),
        ({"use_sliding_window": True, "sliding_window": 4096}, {"sliding_window": 512}, ["error"]),
        ({"rope_theta": 1e4}, {"rope_theta": 1e6}, ["error"]),
        ({"rope_theta": 1e6}, {"rope_theta": None, "rope_parameters":
          {"rope_theta": 1e6, "rope_type": "default"}}, []),
        ({"torch_dtype": "bfloat16"}, {"torch_dtype": None, "dtype": "float16"}, []),
        ({"eos_token_id": 1}, {"eos_token_id": [1, 2]}, ["warning"]),
    ],
)  # fmt: skip
def test_what_is_told(
    there: dict[str, Any], here: dict[str, Any], found: list[str], tmp_path: Path
) -> None:
    folders = tmp_path / "source", tmp_path / "artifact"
    for folder, changed in zip(folders, (there, there | here), strict=True):
        folder.mkdir()
        for name in ("model.safetensors", "tokenizer.json"):
            shutil.copy(TINY / name, folder / name)
        config = json.loads((TINY / "config.json").read_text())
        config = {key: value for key, value in (config | changed).items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))
    verdict = verify_artifact(folders[1], against=folders[0])
    assert [f.severity for f in verdict.findings if f.check == "settings"] == found

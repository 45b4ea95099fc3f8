"""Settings that say the same in other words, as libraries leave them, are no findings."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from qtool import tiny
from qtool.verification.run import verify_artifact
from support.gallery import raw
from support.gguf import gguf_models

TINY = Path(tiny.__file__).parent
LLAMA, MISTRAL, QWEN2 = (
    {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()}
    for name in ("Llama", "Mistral", "Qwen2")
)


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
        # As in what is made of a GGUF file, which has no key for it.
        ({"hidden_act": "silu"}, {"hidden_act": None}, []),
        ({"hidden_act": "gelu"}, {"hidden_act": None}, ["error"]),
        ({**MISTRAL, "sliding_window": False}, {**LLAMA, "sliding_window": None}, []),
        ({**MISTRAL, "sliding_window": 64}, {**LLAMA, "sliding_window": None}, ["error"]),
        (QWEN2, LLAMA, ["error"]),
        # Said by one and left to the class by the other, as transformers reads both.
        ({"rms_norm_eps": 1e-6}, {"rms_norm_eps": None}, []),
        ({"rms_norm_eps": 2e-6}, {"rms_norm_eps": None}, ["error"]),
        ({**MISTRAL, "sliding_window": 4096}, {"sliding_window": None}, []),
        ({**MISTRAL, "sliding_window": 512}, {"sliding_window": None}, ["error"]),
        ({"num_nextn_predict_layers": 0}, {"num_nextn_predict_layers": None}, []),
        ({"num_nextn_predict_layers": 1}, {"num_nextn_predict_layers": None}, ["error"]),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 4},
         {"no_rope_layer_interval": None}, []),
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
        if config.get("sliding_window") is False:
            config["sliding_window"] = None  # said to be none, which is not unsaid
        (folder / "config.json").write_text(json.dumps(config))
    verdict = verify_artifact(folders[1], against=folders[0])
    assert [f.severity for f in verdict.findings if f.check == "settings"] == found


def test_whether_a_head_is_tied_stands_outside_of_the_text(tmp_path: Path) -> None:
    """Of a model that also sees: the class of its decoder alone knows nothing of it."""
    folders = tmp_path / "source", tmp_path / "artifact"
    for folder, tied in zip(folders, (False, True), strict=True):
        gguf_models.build("mistral4", folder)
        gguf_models.rewrite_config(folder, lambda config, tied=tied: config.update(
            tie_word_embeddings=tied))  # fmt: skip
    verdict = verify_artifact(folders[1], against=folders[0])
    said = [f.message for f in verdict.findings if f.check == "settings"]
    assert len(said) == 1 and "tie_word_embeddings true, there false" in said[0]


@pytest.mark.parametrize("changed", [False, True])
def test_a_head_that_is_the_embedding_is_tied_in_all_but_name(
    changed: bool, tmp_path: Path
) -> None:
    """What holds one of the two against a source that stores both, alike or not."""
    folders = tmp_path / "source", tmp_path / "artifact"
    for folder, is_tied in zip(folders, (False, True), strict=True):
        shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": is_tied}))
    with raw.edited(folders[0]) as tensors:
        head = tensors["model.embed_tokens.weight"].array.copy()
        if changed:
            head.flat[-1] ^= 1
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].changed(head)
    with raw.edited(folders[1]) as tensors:
        tensors.pop("lm_head.weight", None)
    findings = verify_artifact(folders[1], against=folders[0]).findings
    assert any(f.check == "settings" for f in findings) is changed

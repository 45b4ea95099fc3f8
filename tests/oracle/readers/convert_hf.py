"""Runs with llama.cpp's sources at hand: convert checkpoints by its own classes.

Argument, as JSON: {"source": llama.cpp's folder, "jobs": [[checkpoint, type, output], ...],
"vocabulary": false to leave out the tokenizer's keys, which random models do not have}.
"""

import json
import sys
import types
from pathlib import Path

# transformers 5 calls kinds of blocks, or the activation, otherwise than the converter, and adds
# experts, or heads of keys.
_CALLED_OTHERWISE = (
    "nemotron_h",
    "granitemoehybrid",
    "falcon",
    "qwen4_exp_text",
    "kimi_linear",
    "dots3_note_text",
    "glm5_next",
    "step3p7",
    "minimax_m3_vl",
    "deepseek_v4",
    "bailing_hybrid",
    "exaone",
)
# What thinks alone, as the class of the whole that the converter knows.
_WHOLE = {
    "Qwen2_5OmniThinkerForConditionalGeneration": "Qwen2_5OmniModel",
    "Qwen3OmniMoeThinkerForConditionalGeneration": "Qwen3OmniMoeForConditionalGeneration",
}


def names_in(folder: Path) -> list[str]:
    """The tensors of a checkpoint in one file."""
    file = folder / "model.safetensors"
    if not file.exists():
        return []
    with file.open("rb") as raw:
        return [*json.loads(raw.read(int.from_bytes(raw.read(8), "little")))]


def main() -> None:
    request = json.loads(sys.argv[1])
    sys.path[:0] = [request["source"], str(Path(request["source"]) / "gguf-py")]
    import gguf
    import torch
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    try:
        import sentencepiece  # noqa: F401
    except ImportError:  # it is imported before it is known whether there is a tokenizer.model
        sys.modules["sentencepiece"] = types.SimpleNamespace(SentencePieceProcessor=None)

    kinds = {"f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "f32": "ALL_F32", "auto": "GUESSED"}
    names = gguf.TensorNameMap
    usual = dict(names.block_mappings_cfg)
    for folder, kind, output in request["jobs"]:
        names.block_mappings_cfg = dict(usual)  # to which an architecture before added its own
        settings = ModelBase.load_hparams(Path(folder), False)
        if settings["model_type"] in _CALLED_OTHERWISE:
            settings = json.loads((Path(folder) / "config.json").read_text())
        architecture = get_model_architecture(settings, ModelType.TEXT)
        model = get_model_class(_WHOLE.get(architecture, architecture))
        if not request["vocabulary"]:
            # Mistral 3 leaves all to one of the classes inside it.
            for one in (model, *(c for c in vars(model).values() if isinstance(c, type))):
                one.set_vocab = lambda self: None
        if settings["model_type"] == "minimax":  # tokens without a row, which it asks a tokenizer
            model._get_suppress_tokens = lambda self: None
        if settings["model_type"] == "gpt_neox":  # transformers 5 has moved it, the converter asks
            settings["rotary_pct"] = settings["rope_parameters"]["partial_rotary_factor"]
        if settings["model_type"] == "gpt2":
            settings["n_ctx"] = settings["n_positions"]  # of the same meaning, and dropped
        if settings["model_type"] == "mimo_v2_flash":  # of all blocks, and the converter asks so
            rope = settings["rope_parameters"]
            rope["partial_rotary_factor"] = rope["full_attention"]["partial_rotary_factor"]
            model.no_mtp = True
        if settings["model_type"].startswith(("qwen3_5", "qwen3_next", "minicpmv4_6")):
            # As its option --no-mtp: a checkpoint without such blocks is not converted otherwise.
            model.no_mtp = not any(name.startswith("mtp.") for name in names_in(Path(folder)))
        ftype = gguf.LlamaFileType[kinds[kind]]
        with torch.inference_mode():
            model(Path(folder), ftype, Path(output), hparams=settings).write()
    print(len(request["jobs"]))


main()

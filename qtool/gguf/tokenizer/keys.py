"""The tokenizer of a Hugging Face folder as the metadata keys of a GGUF file.

Written are the keys that llama.cpp's converter writes, in its order; JSON and tokenizer.model are
read in plain Python, without a tokenizer library. Which of the forms that a folder may hold is
taken, and what is written beside it, depends on the architecture: POLICIES. Source: llama.cpp,
conversion/*.py (set_vocab).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qtool.errors import FormatError, UnsupportedError
from qtool.formats.gguf_values import Kind, Value, array, boolean, string, u32
from qtool.gguf.tokenizer.bpe import PREFIX, TokenType, bpe_metadata
from qtool.gguf.tokenizer.gemma4 import gemma4_metadata
from qtool.gguf.tokenizer.hf_json import CONFIG, TOKENIZER, model_of, read_object, special_names
from qtool.gguf.tokenizer.special import (
    ADD_KEYS,
    ID_KEYS,
    end_metadata,
    fixed_metadata,
    special_metadata,
    special_named,
)
from qtool.gguf.tokenizer.spm import json_metadata, read_model, spm_metadata

MODEL_KEY = PREFIX + "model"
# Lists as long as the vocabulary: a folder's files tell them, and nothing else could.
LONG_KEYS = {
    PREFIX + name for name in ("tokens", "scores", "token_type", "merges", "precompiled_charsmap")
}
OVERRIDES = "gguf_metadata"  # of tokenizer_config.json, where qtool wrote it: files.py


@dataclass(frozen=True)
class Policy:
    """How the tokenizer of one architecture is written."""

    model: bool = True  # tokenizer.model is taken before tokenizer.json
    prefix: bool = False  # tokenizer_config.json's add_prefix_space is written
    no_space: bool = False  # add_space_prefix is false
    json_no_space: bool = False  # the same, where there is no tokenizer.model
    phi3: bool = False
    turn_end: int | None = None  # the id of <end_of_turn>, which no file names
    named: Mapping[str, str] = field(default_factory=dict)  # tokens that no file names as such
    prefix_last: bool = False  # add_prefix_space is written behind everything else
    no_bos: bool = False  # unless the files say that it is added
    ids: tuple[tuple[str, int], ...] = ()  # of special tokens, whatever the files say
    fixed: Mapping[str, str] = field(default_factory=dict)  # the same by their texts
    end_by_config: bool = False  # Hunyuan's end of a text and of a turn
    end: str = ""  # the token that ends a text, whatever the files say
    gemma4: bool = False  # a kind of its own, which always begins a text with bos


_LLAMA = Policy(prefix=True)
_JSON = Policy(model=False)
_GLM = Policy(
    model=False,
    named={"bos": "[gMASK]", "eot": "<|user|>", "unk": "<|endoftext|>", "eom": "<|observation|>"},
)
_OF_GLM = {"eos": "<|endoftext|>", "eot": "<|user|>", "unk": "<|endoftext|>"}
_GLM4 = Policy(model=False, named={**_OF_GLM, "bos": "<|endoftext|>"})
POLICIES = {
    "llama": _LLAMA, "mistral3": _LLAMA, "granite": _LLAMA, "granitemoe": _LLAMA,
    "granite_swa": _LLAMA,
    "smollm3": _LLAMA, "arcee": _LLAMA,
    "gemma": Policy(no_space=True, turn_end=107),
    "gemma2": Policy(no_space=True),
    "gemma3": Policy(no_space=True),
    "gemma3n": Policy(no_space=True),
    "gemma4": Policy(gemma4=True),
    "phi3": Policy(phi3=True),
    "qwen2moe": _JSON, "qwen3moe": _JSON, "qwen3vlmoe": _JSON, "olmo2": _JSON,
    "stablelm": _JSON, "gptneox": _JSON,
    "mamba": _JSON, "falcon-h1": _JSON, "jais2": _JSON, "cohere2moe": _JSON, "mellum": _JSON,
    "apertus": _LLAMA, "mamba2": Policy(), "jamba": Policy(json_no_space=True),
    "olmoe": _JSON, "dots1": _JSON, "minimax-m2": _JSON, "glm4moe": _GLM,
    "glm-dsa": _GLM, "deepseek32": _JSON, "mistral4": _JSON, "hy_v3": _JSON, "exaone-moe": _JSON,
   
    "gpt2": _JSON, "bloom": _JSON, "mpt": _JSON, "falcon": _JSON,
    "olmo": _JSON, "command-r": _JSON, "cohere2": _JSON, "seed_oss": _JSON, "exaone4": _JSON,
    "exaone": _JSON, "bailingmoe": _JSON, "bailingmoe2": _JSON, "smallthinker": _JSON,
    "hrm_text": _JSON, "starcoder": _JSON, "dbrx": _JSON, "starcoder2": _JSON,
    "mimo2": _JSON, "laguna": _JSON, "minimax-m3": _JSON, "step35": _JSON,
    "glm5-next": _GLM, "dots3note": _JSON, "hy_v4": _JSON, "kimi-linear": _JSON,
    "qwen4exp": _JSON,
    "granitehybrid": Policy(), "nemotron_h": _JSON,
    "nemotron_h_moe": _JSON, "lfm2": _JSON, "lfm2moe": _JSON,
    "phi2": Policy(model=False, no_bos=True),
    "ernie4_5": Policy(prefix_last=True),
    "nemotron": Policy(ids=(("pad", 0), ("unk", 1))),
    "glm4": _GLM4,
    "chatglm": Policy(model=False, named=_OF_GLM, no_bos=True),
    "hunyuan-moe": Policy(model=False, ids=(("bos", 127959),)),
    "hunyuan-dense": Policy(model=False, end_by_config=True),
    "hunyuan_vl": Policy(model=False, end_by_config=True),
    "paddleocr": Policy(prefix_last=True), "chameleon": _JSON,
    "muse-glimmer": Policy(model=False, fixed={"eot": "<|eot|>"}),
}  # fmt: skip
# What thinks in Qwen3-Omni begins and ends with the same token, unlike others of its architecture.
_OMNI = Policy(model=False, fixed={"bos": "<|im_end|>", "eos": "<|im_end|>"})
# Of classes that share an architecture with others.
_OF_CLASS = {
    "SolarOpenForCausalLM": Policy(
        model=False,
        named={"eos": "<|endoftext|>", "eot": "<|endoftext|>", "unk": "<unk>",
               "bos": "<|startoftext|>"},
    ),
    "Qwen3OmniMoeForConditionalGeneration": _OMNI,
    "Qwen3OmniMoeThinkerForConditionalGeneration": _OMNI,
    "InternLM3ForCausalLM": Policy(prefix=True, end="<|im_end|>"),
}  # fmt: skip
_UNIFIED = "Gemma4UnifiedForConditionalGeneration"
_TURN_END = PREFIX + "eot_token_id"
_CODE_LLAMA_SIZE, _CODE_LLAMA_TURN_END = 32016, 32010
_SMALL_GRANITE_SIZE = 49152


def tokenizer_metadata(
    folder: Path,
    arch: str,
    vocab_size: int,
    config: Mapping[str, Any],
    pre: str | None = None,
) -> dict[str, Value]:
    """Every tokenizer key of a checkpoint's folder, in the order of writing.

    arch: general.architecture; vocab_size: rows of the embedding; config: config.json; pre: the
    name of the pre-tokenizer, where it is known better than by the folder.
    """
    named = config.get("architectures")
    policy = _OF_CLASS.get(str(named[0]) if isinstance(named, list) and named else "")
    policy = policy or POLICIES.get(arch, Policy())
    tokenizer_config = read_object(folder / CONFIG)
    keys: dict[str, Value] = {}
    given = tokenizer_config.get("add_prefix_space")
    if policy.prefix and isinstance(given, bool):
        keys[PREFIX + "add_space_prefix"] = boolean(given)
    body = _body(folder, policy, tokenizer_config, vocab_size, pre)
    keys |= {key: value for key, value in body.items() if key not in keys}
    data = read_object(folder / TOKENIZER)
    keys |= special_metadata(folder, data, tokenizer_config, config, vocab_size, policy.named)
    if policy.end_by_config:
        keys |= end_metadata(folder, config, vocab_size)
    if policy.end and ID_KEYS["eos"] in keys:
        keys |= special_named(tokenizer_config, policy.end, "eos")
    keys |= {ID_KEYS[kind]: u32(number) for kind, number in policy.ids}
    keys |= fixed_metadata(data, policy.fixed, vocab_size)
    if policy.gemma4:
        keys[PREFIX + "add_space_prefix"] = boolean(False)
        keys[ADD_KEYS["bos"]] = boolean(True)
        keys |= _suppressed(folder, config, vocab_size)
    if policy.no_bos:
        keys.setdefault(ADD_KEYS["bos"], boolean(False))
    if policy.prefix_last and isinstance(given, bool):
        keys[PREFIX + "add_space_prefix"] = boolean(given)
    if policy.no_space and keys[MODEL_KEY].value == "llama":
        keys.pop(PREFIX + "add_space_prefix", None)
        if policy.turn_end is not None:
            keys[_TURN_END] = u32(policy.turn_end)
        keys[PREFIX + "add_space_prefix"] = boolean(False)
    if policy.json_no_space and not (folder / "tokenizer.model").is_file():
        keys[PREFIX + "add_space_prefix"] = boolean(False)
    if policy.prefix and vocab_size == _CODE_LLAMA_SIZE:
        keys[_TURN_END] = u32(_CODE_LLAMA_TURN_END)
    if policy.prefix and vocab_size == _SMALL_GRANITE_SIZE:
        # SmolLM and Granite: their post-processors may say otherwise, and the models want none.
        keys[PREFIX + "add_bos_token"] = boolean(False)
    if keys[MODEL_KEY].value == "t5":
        keys |= {k: v for k, v in _t5_defaults(keys, tokenizer_config).items() if k not in keys}
    _check(folder, keys)
    return _override(keys, tokenizer_config, pre)


def _body(
    folder: Path,
    policy: Policy,
    tokenizer_config: Mapping[str, Any],
    vocab_size: int,
    pre: str | None,
) -> dict[str, Value]:
    """The vocabulary's keys, from the file that the policy prefers."""
    if policy.gemma4:
        return gemma4_metadata(folder, model_of(folder), tokenizer_config, vocab_size)
    as_gpt2 = policy.phi3 and tokenizer_config.get("tokenizer_class") == "GPT2Tokenizer"
    data = model_of(folder) if (folder / TOKENIZER).is_file() else None
    told = data["model"] if data else {}
    kind = told.get("type", "BPE")
    scored = kind == "Unigram" or (kind == "BPE" and bool(told.get("byte_fallback")))
    if scored or data is None or (policy.model and not as_gpt2):
        model = read_model(folder)
        if model is not None:
            keys = spm_metadata(folder, model, tokenizer_config, vocab_size, policy.phi3)
            if not model.add_dummy_prefix:
                keys.setdefault(PREFIX + "add_space_prefix", boolean(False))
            return keys
    if data is None:
        data = model_of(folder)  # says that there is none
    if scored:
        return json_metadata(folder, data, tokenizer_config, vocab_size)
    if kind == "BPE":
        return bpe_metadata(folder, data, tokenizer_config, vocab_size, pre)
    raise UnsupportedError(
        f"{folder / TOKENIZER}: its model is {kind!r}; qtool writes BPE and Unigram tokenizers "
        "into GGUF files"
    )


def _suppressed(folder: Path, config: Mapping[str, Any], limit: int) -> dict[str, Value]:
    """What Gemma 4's unified model never says, by generation_config.json."""
    given = read_object(folder / "generation_config.json").get("suppress_tokens")
    if _UNIFIED not in (config.get("architectures") or ()) or not isinstance(given, list):
        return {}
    tokens = [number for number in given if type(number) is int and 0 <= number < limit]
    return {PREFIX + "suppress_tokens": array(Kind.INT32, tokens)} if tokens else {}


def _t5_defaults(
    keys: Mapping[str, Value], tokenizer_config: Mapping[str, Any]
) -> dict[str, Value]:
    """Said outright, since llama.cpp takes T5's ids, and an eos after each text, if nothing is."""
    tokens, types = keys[PREFIX + "tokens"].value, keys[PREFIX + "token_type"].value
    names = special_names(tokenizer_config)
    ids = {name: tokens.index(text) for name, text in names.items() if text in tokens}
    if TokenType.UNKNOWN in types:
        ids["unk"] = types.index(TokenType.UNKNOWN)
    said = {key: u32(ids[name]) for name, key in ID_KEYS.items() if name in ids}
    return said | {ADD_KEYS[name]: boolean(False) for name in ("bos", "eos")}


def _check(folder: Path, keys: Mapping[str, Value]) -> None:
    """Refuses a token that is there twice: llama.cpp aborts on it."""
    tokens = keys[PREFIX + "tokens"].value
    if len(set(tokens)) == len(tokens):
        return
    text, _ = Counter(tokens).most_common(1)[0]
    first, second = [number for number, token in enumerate(tokens) if token == text][:2]
    raise FormatError(
        f"{folder}: the ids {first} and {second} are both the token {text!r}, and llama.cpp takes "
        "a token only once; the tokenizer's files are damaged"
    )


def _override(
    keys: dict[str, Value], tokenizer_config: Mapping[str, Any], pre: str | None
) -> dict[str, Value]:
    """The keys with those that a checkpoint made from a GGUF file remembers of that file."""
    given = tokenizer_config.get(OVERRIDES)
    for key, value in given.items() if isinstance(given, dict) else ():
        if not key.startswith("tokenizer.") or key in LONG_KEYS or key == MODEL_KEY:
            continue
        if key == PREFIX + "pre" and pre is not None:
            continue
        if value is None:
            keys.pop(key, None)
        elif isinstance(value, bool):
            keys[key] = boolean(value)
        elif isinstance(value, int) and 0 <= value < 1 << 32:
            keys[key] = u32(value)
        elif isinstance(value, str):
            keys[key] = string(value)
    return keys

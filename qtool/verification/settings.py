"""config.json and the tokenizer against the source's: what an engine computes with besides weights.

No shape tells a wrong rope_theta, and no weight a vocabulary in another order.
"""

import json
from collections.abc import Iterator, Mapping
from math import isclose
from pathlib import Path
from sys import float_info
from typing import Any

from qtool.calibrating.weights import Weights
from qtool.checkpoint import Checkpoint
from qtool.decoder_names import is_alone
from qtool.gguf.architectures import TABLE
from qtool.gguf.hf_config import complete
from qtool.gguf.tokenizer_json import TOKENIZER, read_object
from qtool.verification.finding import Finding
from qtool.verification.heads import head_is_embedding, heads_of
from qtool.verification.sentences import count as counted
from qtool.verification.sentences import some
from qtool.verification.subject import Subject
from qtool.verification.tokens import ids_of
from qtool.verification.unlike_settings import VOCABULARY, is_number, unlike

_TIED = "tie_word_embeddings"
_SHOWN = 60  # characters of a value
_CLASSES = ("architectures", "model_type")
# But for a window, which is a setting of its own, these compute the same; GGUF calls both llama.
_SAME_CLASS = frozenset({"LlamaForCausalLM", "MistralForCausalLM"})
# What running a model does not depend on, and spellings of what has one form in `_whole`.
_IDLE = (
    "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache", "initializer_range",
    "quantization_config", "compression_config", "text_config", "vision_config", "audio_config",
    "id2label", "label2id", "problem_type", "return_dict", "pretraining_tp", "max_window_layers",
    "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
    "rope_scaling", "rope_theta", "rotary_emb_base", "rotary_pct", "partial_rotary_factor",
    "rope_local_base_freq", "original_max_position_embeddings",
    "num_local_experts", "num_experts_per_token", "norm_eps", "layer_norm_epsilon",
)  # fmt: skip
_IDLE_ENDS = ("dropout", "dropout_prob", "pdrop", "_implementation")
# What may have been changed on purpose: where text begins and ends, how long it may be.
_CHOSEN = ("token_id", "max_position_embeddings")
# Without these, and without numbers, the class has values of its own.
_NEEDED = (
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "hidden_activation", "activation_function", "rms_norm_eps", "layer_norm_eps",
    "bos_token_id", "eos_token_id",
)  # fmt: skip


def check_settings(subject: Subject, source: Weights) -> Iterator[Finding]:
    """settings: config.json says what the source's says."""
    if not subject.config or not source.config:
        return
    here, there = _whole(subject.config), _whole(source.config)
    idle = {"sliding_window"} if _sees_all(here) and _sees_all(there) else set[str]()
    keys = [k for k in sorted(there) if k not in idle and not _idle(k) and not _unsaid(there[k])]
    lost = [key for key in keys if _unsaid(here.get(key)) and _needed(key, there[key], source)]
    different = [k for k in keys if not _unsaid(here.get(k)) and not _alike(here[k], there[k])]
    if _TIED in different and here[_TIED] is False and heads_of(subject):
        different.remove(_TIED)  # as a rotation leaves it, or a head that was quantized
    if _TIED in different and here[_TIED] is True and head_is_embedding(source):
        different.remove(_TIED)  # as what is made of a GGUF file, which has one copy of the two
    # A language model alone, or one class under two names.
    if (
        is_alone(subject.config, source.config)
        or {_class_of(config) for config in (here, there)} == _SAME_CLASS
    ):
        different = [key for key in different if key not in _CLASSES]
    different += [key for key in lost if key not in different]
    yield from unlike(
        different,
        _CHOSEN,
        lambda keys: _listed(keys, here, there),
        "engines compute as config.json says: put back the source's",
        "put back the source's",
    )


def _class_of(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def _whole(config: Mapping[str, Any]) -> dict[str, Any]:
    """With the defaults of its class, where that is known, and rope settings in one form."""
    row = TABLE.get(_class_of(config))
    if row is None:
        return complete(config, {})
    # GGUF has no key for it, so that what is made of such a file leaves it to the class.
    whole = row.completed(config)
    if not row.name.startswith("gemma"):
        return {"hidden_act": row.activations[0], **whole}
    for key in ("hidden_act", "hidden_activation"):  # Gemma's class takes null for it, too
        if whole.get(key) is None:
            whole[key] = "gelu_pytorch_tanh"
    return whole


def _idle(key: str) -> bool:
    return key in _IDLE or key.startswith("_") or key.endswith(_IDLE_ENDS)


def _sees_all(config: Mapping[str, Any]) -> bool:
    """Whether no window is used, whose width some libraries write and others do not."""
    return config.get("use_sliding_window") is False


def _unsaid(value: object) -> bool:
    return value is None or value == [] or value == {}


def _needed(key: str, value: object, source: Weights) -> bool:
    """Whether the class takes a value of its own where a setting is not said: of any number it may.

    What a GGUF file is made into says more than checkpoints do.
    """
    return key in _NEEDED or (isinstance(source, Checkpoint) and is_number(value))


def _alike(one: Any, other: Any) -> bool:
    """Whether two settings say the same; what is null is not said."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        keys = {key for part in (one, other) for key in part if part[key] is not None} - {"type"}
        return all(key in one and key in other and _alike(one[key], other[key]) for key in keys)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if is_number(one) and is_number(other) and max(abs(one), abs(other)) <= float_info.max:
        return isclose(one, other, rel_tol=1e-6)
    return bool(one == other)


def _listed(keys: list[str], here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    said = some([f"{key} {_short(here.get(key))}, there {_short(there[key])}" for key in keys])
    return f"config.json has {counted(len(keys), 'setting')} unlike the source's: {said}"


def _short(value: object) -> str:
    return "nothing" if value is None else json.dumps(value)[:_SHOWN]


def check_vocabulary(subject: Subject, source: Weights) -> Iterator[Finding]:
    """vocabulary: the source's tokens under the source's ids, joined in the source's order."""
    folders = subject.artifact.checkpoint.folder, source.folder
    here, there = (ids_of(folder) for folder in folders)
    if not here or not there:
        return
    moved = [token for token in sorted(there, key=there.__getitem__)
             if token in here and here[token] != there[token]]  # fmt: skip
    lost = [token for token in there if token not in here]
    what = ""
    if moved:
        token = moved[0]
        what = (
            f"{counted(len(moved), 'token')} under other ids than the source's ({token[:_SHOWN]!r} "
            f"under {here[token]}, there {there[token]})"
        )
    elif lost:
        what = f"{len(lost):,} of the source's {len(there):,} tokens missing ({lost[0][:_SHOWN]!r})"
    elif (one := _merges(folders[0])) and (other := _merges(folders[1])) and one != other:
        what = "other rules of joining pieces than the source's (merges)"
    if what:
        yield Finding(
            "error", VOCABULARY, TOKENIZER,
            f"the tokenizer has {what}; the model would read and write other words: put the "
            "source's beside the weights",
        )  # fmt: skip


def _merges(folder: Path) -> list[str]:
    """Pairs of pieces by rank; they are lists of two, or strings with a space between."""
    model = read_object(folder / TOKENIZER).get("model")
    merges = model.get("merges") if isinstance(model, Mapping) else None
    pairs = merges if isinstance(merges, list) else []
    return [" ".join(map(str, pair)) if isinstance(pair, list) else str(pair) for pair in pairs]

"""config.json and the tokenizer against the source's: what an engine computes with besides weights.

No shape tells a wrong rope_theta, and no weight a vocabulary in another order.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from math import isclose
from pathlib import Path
from sys import float_info
from typing import Any

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.decoder_names import is_alone
from qtool.checkpoints.gguf_models import is_gguf
from qtool.gguf.architectures.mtp import MTP
from qtool.gguf.tokenizer.hf_json import TOKENIZER, read_object
from qtool.messages.sentences import count as counted
from qtool.messages.sentences import some
from qtool.streaming.weights import Weights
from qtool.verification.as_read import as_read
from qtool.verification.classes import ALIKE
from qtool.verification.finding import Finding
from qtool.verification.heads import head_is_embedding, heads_of
from qtool.verification.settings_form import as_written, class_of, one_form, unread
from qtool.verification.subject import Subject
from qtool.verification.tokens import ids_of
from qtool.verification.unlike_settings import VOCABULARY, is_number, unlike

_TIED = "tie_word_embeddings"
_SHOWN = 60  # characters of a value
_CLASSES = ("architectures", "model_type")
# But for a window, which is a setting of its own, these compute the same; GGUF calls both llama.
_SAME_CLASS = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "InternLM3ForCausalLM"})
# What running a model does not depend on, and spellings of what has one form in `_whole`.
_IDLE = (
    "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache", "initializer_range",
    "quantization_config", "compression_config", "text_config", "vision_config", "audio_config",
    "id2label", "label2id", "problem_type", "return_dict", "pretraining_tp", "max_window_layers",
    "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
    "rope_scaling", "rope_theta", "rotary_emb_base", "rotary_pct", "partial_rotary_factor",
    "rope_local_base_freq", "original_max_position_embeddings",
    "num_local_experts", "num_experts_per_token", "norm_eps", "layer_norm_epsilon",
    "mamba_chunk_size", "chunk_size",
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
    alone = is_alone(subject.config, source.config)
    here, there = (one_form(config, alone) for config in (subject.config, source.config))
    if is_gguf(source.path):  # which is shown as llama.cpp computes it
        here, there = (_without(config, "truncate") for config in (here, there))
    idle = unread(here) & unread(there)
    if alone:
        idle |= {*source.config} - {*subject.config, *(source.config.get("text_config") or {})}
    keys = [k for k in sorted(there) if k not in idle and not _idle(k)
            and not _unsaid(there[k]) and not _none_ahead(k, there[k])]  # fmt: skip
    lost = [key for key in keys if _unsaid(here.get(key)) and _needed(key, there[key], source)]
    different = [k for k in keys if not _unsaid(here.get(k)) and not _alike(here[k], there[k])]
    if _TIED in different and here[_TIED] is False and heads_of(subject):
        different.remove(_TIED)  # as a rotation leaves it, or a head that was quantized
    if _TIED in different and here[_TIED] is True and head_is_embedding(source):
        different.remove(_TIED)  # as what is made of a GGUF file, which has one copy of the two
    # A language model alone, or one class under two names.
    if alone or {class_of(config) for config in (here, there)} <= _SAME_CLASS:
        other = {config.get("model_type") for config in (here, there)} - {None, *ALIKE}
        left_out = _CLASSES if alone or not other else ("architectures",)
        different = [key for key in different if key not in left_out]
    different += [key for key in lost if key not in different]
    if different and not {*_CLASSES} & {*different}:
        read = [as_read(folder) for folder in (subject.artifact.checkpoint.folder, source.folder)]
        # Whether the head is tied stands outside of the decoder's settings, which are read.
        different = [key for key in different if key == _TIED or not _read_alike(key, *read)]
    written = subject.config, source.config

    def called(key: str) -> str:
        return as_written(_innermost(key, here.get(key), there[key])[0], written)

    yield from unlike(
        different,
        _CHOSEN,
        lambda keys: _listed(keys, here, there, written),
        "engines compute as config.json says: put back the source's",
        "put back the source's",
        called,
    )


def _without(settings: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The settings, and those within, without one."""
    return {
        name: _without(value, key) if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if name != key
    }


def _read_alike(key: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> bool:
    """Whether a setting is the same once transformers has read both."""
    return key in here and key in there and _alike(here[key], there[key])


def _idle(key: str) -> bool:
    return key in _IDLE or key.startswith("_") or key.endswith(_IDLE_ENDS)


def _unsaid(value: object) -> bool:
    return value is None or value == [] or value == {}


def _none_ahead(key: str, value: object) -> bool:
    """Whether it says that there is no multi-token prediction, as it does where it is not said."""
    return key in ("num_nextn_predict_layers", MTP) and value == 0


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


def _listed(
    keys: list[str],
    here: Mapping[str, Any],
    there: Mapping[str, Any],
    written: Sequence[Mapping[str, Any]],
) -> str:
    pairs = [_innermost(key, here.get(key), there[key]) for key in keys]
    said = some(
        [f"{as_written(key, written)} {_short(a)}, there {_short(b)}" for key, a, b in pairs]
    )
    return f"config.json has {counted(len(keys), 'setting')} unlike the source's: {said}"


def _innermost(key: str, one: Any, other: Any) -> tuple[str, Any, Any]:
    """The setting itself, of objects the first that differs in them."""
    while isinstance(one, Mapping) and isinstance(other, Mapping):
        inner = next(k for k in sorted({*one, *other}) if not _alike(one.get(k), other.get(k)))
        key, one, other = f"{key}.{inner}", one.get(inner), other.get(inner)
    return key, one, other


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

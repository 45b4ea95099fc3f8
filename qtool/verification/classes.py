"""Whether config.json tells which model the weights are of: its class and model type, and counts.

vLLM and SGLang go by `architectures`, transformers by `model_type`. The two are of one name but in
a few models of transformers, which are listed here: it is not asked itself, as it takes seconds to
import, but where its own view of an artifact is wanted (--engine transformers).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from qtool.checkpoints.structure import text_config
from qtool.verification.finding import Finding, of_setting
from qtool.verification.subject import Subject

CHECK = "class"
_SHOWN = 60  # characters of a value
# What comes behind the model's name in a class's.
_TASK = re.compile(r"(For[A-Z]|LMHead|Model$|Model(?=[A-Z])).*")
_SPELLED = re.compile("[A-Za-z0-9_.-]+")
# Read by vLLM's own code (0.33, transformers_utils/config.py), under any class.
_OF_VLLM = frozenset({
    "RefinedWeb", "RefinedWebModel", "deepseek_v32", "deepseek_vl_v2", "eagle", "kimi_k2",
    "kimi_k25", "kimi_k3", "kimi_linear", "kimi_vl", "minimax_m3_vl", "speculators", "step3_text",
    "step3_vl", "step3p5", "step5", "step5_vl",
})  # fmt: skip
_WITHOUT_TYPE = ("LongcatFlashForCausalLM", "LongcatFlashNgramForCausalLM")  # likewise
# Types of one computation, each called by the others' names, too.
ALIKE = frozenset({"llama", "mistral", "internlm3"})
# What else transformers (5.24, models/auto) calls the classes of a type, as `_family` has it.
_OTHERS: Mapping[str, tuple[str, ...]] = {
    "exaone": ("llama",), "gemma4": ("jev",), "glmga": ("glm46v",),
    "gpt-sw3": ("gpt2",), "hunyuan_v1_dense": ("hunyuandensev1",),
    "hunyuan_v1_moe": ("hunyuanmoev1",), "inkling_mm_model": ("inkling",),
    "internlm3": ("llama",), "iquestcoder": ("llama",), "minimax_m3_vl": ("minimaxm3sparse",),
    "nemo_speechlm": ("nemotron35transcribe",), "pp_chart2table": ("gotocr2",),
    "qwen2": ("jev",), "qwen3_5": ("jev",), "qwen3_5_moe": ("jev",), "qwen3_5_text": ("jev",),
    "sarvam_mla": ("deepseekv3",), "sarvam_moe": ("glm4moe",), "shieldgemma2": ("gemma3",),
    "speech_to_text": ("speech2text",),
}  # fmt: skip
COUNTS: Mapping[str, int] = {  # and the least of each
    "num_hidden_layers": 1, "hidden_size": 1, "vocab_size": 1,
    "num_attention_heads": 0, "num_key_value_heads": 0,  # of models that do not attend
}  # fmt: skip


def check_class(subject: Subject) -> Iterator[Finding]:
    """class: architectures and model_type name one model, and counts are counts."""
    config = subject.config
    yield from _counts(text_config(config))
    named, kind = config.get("architectures"), config.get("model_type")
    if named is not None and not _is_names(named):
        yield Finding(
            "error", CHECK, "architectures",
            f"config.json says architectures {_shown(named)}; expected a list with the name of a "
            "class: put back the model's own",
            of_setting("architectures"),
        )  # fmt: skip
        return
    first = named[0] if named else None
    if kind is not None and (not isinstance(kind, str) or not _SPELLED.fullmatch(kind)):
        yield Finding(
            "error", CHECK, "model_type",
            f"config.json says model_type {_shown(kind)}; expected a name of letters, digits and "
            "_: put back the model's own",
            of_setting("model_type"),
        )  # fmt: skip
    elif first is None or has_code(config):
        return  # where it has neither, the check of tensors says so
    elif kind is None and first not in _WITHOUT_TYPE:
        yield Finding(
            "warning", CHECK, "model_type",
            "config.json has no model_type, by which transformers, vLLM and SGLang choose how to "
            "read it: put back the model's own",
        )  # fmt: skip
    elif kind is not None and kind not in _OF_VLLM and not _plainly(first, kind):
        yield from _unlike(first, kind)


def _plainly(first: str, kind: str) -> bool:
    """Whether a class has the name of a type, which is spelled as types are."""
    return kind == kind.lower() and _family(first) == _plain(kind)


def _unlike(first: str, kind: str) -> Iterator[Finding]:
    """Of a class and a type of other names, which may be one model's all the same."""
    if kind != kind.lower():
        yield Finding(
            "warning", CHECK, "model_type",
            f"config.json says model_type {_shown(kind)}, and transformers spells all of them in "
            "small letters: put back the model's own",
        )  # fmt: skip
    elif not named_so(first, kind):
        yield Finding(
            "warning", CHECK, "architectures",
            f"config.json says architectures {_shown(first)}, and model_type {_shown(kind)}, which "
            "are not one model's by their names: vLLM and SGLang go by the one, transformers by "
            "the other; put back the model's own",
        )  # fmt: skip


def refused_by_transformers(config: Mapping[str, Any]) -> Iterator[Finding]:
    """engine-class: what that engine says of a model type that it does not know."""
    kind = config.get("model_type")
    if kind is None and config.get("architectures") and not has_code(config):
        yield Finding(
            "error", "engine-class", "model_type",
            "transformers will refuse a config.json without a model_type: put back the model's own",
        )  # fmt: skip
    elif isinstance(kind, str) and not has_code(config) and classes_of(kind) is None:
        yield Finding(
            "error", "engine-class", "model_type",
            f"{installed()} will refuse model_type {_shown(kind)}: use a version that knows it",
        )  # fmt: skip


def refused_by_servers(config: Mapping[str, Any], engine: str, who: str) -> Iterator[Finding]:
    """engine-class: what vLLM and SGLang make of a config that names no class.

    vLLM takes the class of the model type that has no head, SGLang none (0.33, transformers_utils/
    config.py; 0.5.23, configs/model_config.py).
    """
    if config.get("architectures") or config.get("model_type") is None:
        return
    what = (
        "takes the class without a head and answers with embeddings, or has none, where"
        if engine == "vllm"
        else "will refuse the model, as"
    )
    yield Finding(
        "error", "engine-class", "architectures",
        f"{who} {what} config.json names no class in architectures: put back the model's own",
    )  # fmt: skip


def has_code(config: Mapping[str, Any]) -> bool:
    """Whether it says where the code lies that reads it."""
    table = config.get("auto_map")
    return isinstance(table, Mapping) and "AutoConfig" in table


def installed() -> str:
    """With the version that is installed."""
    import transformers

    return f"transformers {transformers.__version__}"


def classes_of(kind: str) -> frozenset[str] | None:
    """transformers' classes for a model type; None where it knows no such type."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    if kind not in CONFIG_MAPPING:
        return None
    found: set[str] = set()
    for name, table in vars(modeling_auto).items():
        if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES"):
            value = table.get(kind, ())
            found |= {value} if isinstance(value, str) else {*value}
    return frozenset(found)


def named_so(name: str, kind: str) -> bool:
    """Whether a class is one of the type's, or another of the same model's, such as a draft."""
    families = {_plain(kind), _plain(kind.removesuffix("_text")), *_OTHERS.get(kind, ())}
    families |= ALIKE if families & ALIKE else frozenset()
    return any(family in _family(name) for family in families)


def _family(name: str) -> str:
    """The model that a class is of: `llama` of LlamaForCausalLM."""
    return _plain(_TASK.sub("", name))


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def _shown(value: object) -> str:
    return repr(value)[:_SHOWN]


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) and one for one in value)


def _counts(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Integers; of heads some models have a list, one a block."""
    for key, least in COUNTS.items():
        value = config.get(key)
        if value is None or (value and isinstance(value, list) and key.endswith("_heads")):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            yield Finding(
                "error", CHECK, key,
                f"config.json says {key} {_shown(value)}; expected an integer from {least}: "
                "put back the model's own",
                of_setting(key),
            )  # fmt: skip

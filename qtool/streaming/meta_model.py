"""transformers' own modules for a checkpoint, without memory for their weights.

The class and its options come from config.json alone; code that a repository carries is never run.
Only what no checkpoint holds, such as rotary frequencies, is computed for real.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from qtool.checkpoints import structure
from qtool.checkpoints.names import Names
from qtool.checkpoints.padding import in_view
from qtool.checkpoints.structure import OTHER_TOWERS
from qtool.errors import OTHER_MODEL, RTN_CAN, SourceError, UnsupportedError
from qtool.streaming.offline import without_the_hub
from qtool.streaming.towers import (
    attention_of_parts,
    left_out_where_libraries_are_missing,
    part_with_text,
)
from qtool.streaming.weights import Weights

# What model classes raise when the numbers in a config do not go together.
REFUSALS = (
    ValueError,
    TypeError,
    AssertionError,
    LookupError,
    AttributeError,
    RuntimeError,
    ArithmeticError,
    StrictDataclassError,
)


# Of which the later ones are multimodal; the last is no part of early versions of transformers 5.
_FAMILIES = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")


# Of what transformers makes one after the other, so many as a config says.
_COUNTED = re.compile(r"(moe_)?(num|n)(_.*)?_(layers?|labels|blocks|experts)")
_MANY = 32  # of which no model has more, unless its checkpoint has more tensors
_MANY_LABELS = 100_000
_MANY_EXPERTS = 1 << 14  # of a block; a checkpoint may have them in one tensor


def _check_counts(config: Mapping[str, Any], where: Path, tensors: int) -> None:
    """SourceError where building what config.json says would take for ever."""
    for key, value in config.items():
        most = _MANY_LABELS if key.endswith("labels") else max(_MANY, tensors)
        most = _MANY_EXPERTS if key.endswith("experts") else most
        if isinstance(value, dict):
            _check_counts(value, where, tensors)
        elif isinstance(value, int) and value > most and _COUNTED.fullmatch(key):
            raise SourceError(
                f"{where}: {key} is {str(value)[:30]}, and the checkpoint has {tensors} tensors; "
                f"{OTHER_MODEL}"
            )


def _short(error: Exception) -> str:
    """What another library says, in one line."""
    return " ".join(str(error).split())[:200]


@without_the_hub()
def refused_config(checkpoint: Weights) -> str | None:
    """Why transformers does not read config.json, of a type that it knows; None where it does.

    Raises SourceError where reading it would take for ever.
    """
    from transformers import AutoConfig

    where = checkpoint.folder
    _check_counts(checkpoint.config, where / "config.json", len(checkpoint.tensors))
    return _refusal(lambda: AutoConfig.from_pretrained(where, trust_remote_code=False))


@without_the_hub()
def refused_generation(checkpoint: Weights) -> str | None:
    """The same of generation_config.json."""
    from transformers import GenerationConfig

    return _refusal(lambda: GenerationConfig.from_pretrained(checkpoint.folder))


def _refusal(read: Callable[[], object]) -> str | None:
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        read()
    except OSError:  # it is not there, or no JSON
        return None
    except REFUSALS as error:
        return f"{type(error).__name__}: {_short(error)}"
    finally:
        logging.set_verbosity(verbosity)
    return None


@without_the_hub()
def meta_model(checkpoint: Weights) -> Any:
    """The model class of config.json, built by transformers without memory for its weights."""
    import transformers
    from transformers import CONFIG_MAPPING, AutoConfig, initialization
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    where = checkpoint.folder
    if not (where / "config.json").is_file():
        raise SourceError(f"{where}: no config.json, without which the model cannot be run")
    kind = checkpoint.config.get("model_type")
    own = " (the code that comes with it, its auto_map, is never run)"
    unknown = UnsupportedError(
        f"{where / 'config.json'}: transformers has no causal language model of model_type "
        f"{kind!r}{own if 'auto_map' in checkpoint.config else ''}; {RTN_CAN}"
    )
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise unknown
    _check_counts(checkpoint.config, where / "config.json", len(checkpoint.tensors))
    try:
        config = AutoConfig.from_pretrained(where, trust_remote_code=False)
        if part_with_text(checkpoint.config):
            config = config.thinker_config
            if isinstance(config, dict):  # which the class does not know
                raise UnsupportedError(
                    f"{where / 'config.json'}: transformers knows {kind!r} in another layout, one "
                    "without thinker_config; take a checkpoint in that one (-hf)"
                )
        if checkpoint.config.get("tie_word_embeddings") is False:  # a view may have untied them
            config.tie_word_embeddings = False
        if (padded := in_view(checkpoint)) is not None:
            text = structure.text_config(padded.config)
            for key in padded.widths:
                setattr(config.get_text_config(decoder=True), key, text[key])
        # Of multimodal models the decoder is run, on text alone.
        families = (getattr(transformers, name, None) for name in _FAMILIES)
        family = next((f for f in families if f and type(config) in f._model_mapping), None)
        if family is None and (alone := _class_of(checkpoint, type(config))) is None:
            raise unknown
        if family is None:
            model_class, make = alone, alone._from_config
        else:
            model_class = family._model_mapping[type(config)]
            make = partial(family.from_config, trust_remote_code=False)
        attention = "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"
        with (
            torch.device("meta"),
            initialization.no_init_weights(),
            initialization.meta_device_safe_creation_ops(),
            left_out_where_libraries_are_missing(config),
        ):
            model = make(
                config,
                dtype=torch.float32,
                attn_implementation=attention_of_parts(config, attention),
                # One F.linear per expert, in which the expert's own rows can be seen.
                experts_implementation="eager",
            )
    except ImportError as error:
        raise UnsupportedError(
            f"{where / 'config.json'}: transformers builds {kind!r} with a library that is not "
            f"installed: {_short(error)}"
        ) from error
    except OSError as error:
        raise UnsupportedError(
            f"{where / 'config.json'}: transformers builds {kind!r} with what is not there, and "
            f"not fetched: {_short(error)}"
        ) from error
    except REFUSALS as error:
        raise SourceError(
            f"{where / 'config.json'}: transformers cannot build the {kind!r} that it describes "
            f"({type(error).__name__}: {_short(error)}); compare it with the published one"
        ) from error
    return model.eval()


def _class_of(checkpoint: Weights, config: type) -> Any:
    """The class that config.json names, of those that transformers has and finds by no model_type:
    decoders that come as parts of others, such as Mistral 4. None where there is none."""
    import transformers

    named = checkpoint.config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if not isinstance(name, str) or not name.endswith("ForCausalLM"):
        return None
    found = getattr(transformers, name, None)
    return found if getattr(found, "config_class", None) is config else None


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The outermost ModuleList that holds most parameters, and its prefix; of vision and speech
    only where there is no other."""
    best: tuple[tuple[bool, int], str, nn.ModuleList] | None = None
    outer: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(name.startswith(o) for o in outer):
            continue
        outer.append(f"{name}.")
        numbers = sum(parameter.numel() for parameter in module.parameters())
        size = (not OTHER_TOWERS.search(name), numbers)
        if best is None or size > best[0]:
            best = (size, f"{name}.", module)
    if best is None or len(best[2]) == 0:
        raise UnsupportedError(f"{type(model).__name__} has no list of blocks to stream")
    return best[1], best[2]


def fill_buffers(model: Any, names: Names) -> None:
    """Compute the buffers that no checkpoint holds (rotary frequencies and the like).

    This is how transformers' own loading ends: room is made for them, and the class that owns a
    module initializes it; parameters stay on the meta device, where initializing does nothing.
    """
    from transformers import PreTrainedModel

    owners: list[tuple[str, Any]] = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, PreTrainedModel)
    ]
    for path, module in model.named_modules():
        missing = [
            attribute
            for attribute, buffer in module._buffers.items()
            if buffer is not None
            and buffer.device.type == "meta"
            and (f"{path}.{attribute}" if path else attribute) not in names.of_parameter
        ]
        for attribute in missing:
            meta = module._buffers[attribute]
            # A buffer that the class forgets must not be read as chance would have it.
            fill = float("nan") if meta.is_floating_point() else 0
            module._buffers[attribute] = torch.full_like(meta, fill, device="cpu")
        if missing:
            inside = [o for name, o in owners if name == "" or f"{path}.".startswith(f"{name}.")]
            filled = [module._buffers[attribute] for attribute in missing]
            with torch.no_grad():
                inside[-1]._init_weights(module)
                for owner in reversed(inside):  # some set them of all their blocks at once
                    if _forgotten(filled):
                        owner._init_weights(owner)
            if _forgotten(filled):
                raise UnsupportedError(
                    f"{type(model).__name__} leaves {path}.{missing[0]}, which no checkpoint "
                    f"holds, without values; {RTN_CAN}"
                )


def _forgotten(buffers: Sequence[torch.Tensor | None]) -> bool:
    return any(b is not None and b.is_floating_point() and bool(b.isnan().any()) for b in buffers)


def tensors_of(module: nn.Module, prefix: str) -> Iterator[tuple[nn.Module, str, str]]:
    """Every parameter and buffer: the module that owns it, its attribute, its name in the model."""
    for path, owner in module.named_modules():
        for attribute in (*owner._parameters, *owner._buffers):
            if getattr(owner, attribute) is not None:
                yield (
                    owner,
                    attribute,
                    f"{prefix}{path}.{attribute}" if path else (f"{prefix}{attribute}"),
                )

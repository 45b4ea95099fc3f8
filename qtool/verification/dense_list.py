"""Which layers the quantization_config leaves unquantized, against what is stored."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from typing import Any

from qtool.artifacts.stored_config import quantization_config
from qtool.checkpoints.roles import FUSED_EXPERTS
from qtool.checkpoints.structure import fused_layer
from qtool.formats import auto_round
from qtool.formats.bitsandbytes import skips
from qtool.formats.compressed_tensors_config import is_class, named
from qtool.formats.gptq_dynamic import entry_for, negative
from qtool.formats.layer_names import experts_of, is_head
from qtool.formats.patterns import any_of, matches
from qtool.messages.sentences import count as counted
from qtool.messages.sentences import some
from qtool.verification import skip_lists
from qtool.verification.finding import Finding, of_listed
from qtool.verification.skip_lists import CHECK, GROUPS
from qtool.verification.subject import Subject

_LISTS = (
    "modules_to_not_convert", "dynamic", "ignore", "ignored_layers", "exclude_modules",
    "llm_int8_skip_modules", "extra_config", "block_name_to_quantize", "to_quant_block_names",
)  # fmt: skip
# In these the config says whether the head is quantized; of others no engine asks for its codes.
_WITH_HEADS = ("awq", "gptq", "compressed-tensors")


def says_dense(subject: Subject, module: str) -> bool | None:
    """Whether the config leaves a linear layer, named as in the checkpoint, unquantized; None
    where that depends on an expression that is not matched here, or on what is no list."""
    config = quantization_config(subject.artifact.checkpoint)
    unread = skip_lists.unread(config)
    answer = _says_dense(subject, config, module, skip_lists.setting(GROUPS) not in unread)
    return None if answer is False and unread else answer


def _says_dense(
    subject: Subject, config: Mapping[str, Any], module: str, with_targets: bool
) -> bool | None:
    """The same, as if what is no list had no entries. with_targets: whether those can be read."""
    found = subject.artifact.found
    if found.quant_method == auto_round.NAME:
        return auto_round.left_dense(config, module)
    if found.format == "mlx":  # what has no scales is dense there
        entry = subject.entries.get(module)
        stacked = entry is not None and entry.stacked
        return not stacked and f"{module}.scales" not in subject.artifact.checkpoint.tensors
    if found.format == "gptq":
        if is_head(module):
            return config.get("lm_head") is not True
        inside = config.get("modules_in_block_to_quantize")
        if isinstance(inside, list) and inside:
            flat = [n for part in inside for n in (part if isinstance(part, list) else [part])]
            if not any(str(name) in module for name in flat):
                return True
        table = config.get("dynamic")
        key, known = entry_for(table if isinstance(table, Mapping) else {}, module)
        return (key is not None and negative(key)) if known else None
    if found.format == "compressed-tensors":
        groups = config.get("config_groups")
        targets = [
            str(target)
            for group in (groups.values() if isinstance(groups, dict) else ())
            if isinstance(group, dict) and isinstance(group.get("targets"), list)
            for target in group["targets"]
        ]
        ignored = any_of(named(pattern, module) for pattern in found.dense)
        named_or_of_class = [is_class(target) or named(target, module) for target in targets]
        targeted = any_of([*named_or_of_class, *[None] * (not with_targets)])
        return any_of([ignored, None if targeted is None else not targeted])
    if found.format == "modelopt":
        return any(fnmatch(module, pattern) for pattern in found.dense)
    if found.format == "mxfp4":  # engines have it of experts alone
        left = any_of(matches(rf"(?:{name})(?:[.]|$)", module) for name in found.dense)
        return ".experts." not in module or left
    if is_head(module) and found.format == "awq" and config.get("lm_head") is not True:
        return True
    if found.format == "awq":
        return any(name in module for name in found.dense)
    if found.format == "bitsandbytes":
        return any_of(skips(entry, module) for entry in found.dense)
    inside = f".{module}."
    return any(inside.startswith(f".{n}.") or inside.endswith(f".{n}.") for n in found.dense)


def _key_for(subject: Subject, module: str) -> str:
    """The key that leaves a linear layer unquantized, as says_dense has it."""
    found = subject.artifact.found
    config = quantization_config(subject.artifact.checkpoint)
    if found.format == "compressed-tensors":
        ignored = any_of(named(pattern, module) for pattern in found.dense)
        return "ignore" if ignored else "targets of config_groups"
    if found.quant_method != auto_round.NAME and found.format in ("awq", "gptq"):
        if is_head(module) and config.get("lm_head") is not True:
            return "lm_head"
        table = config.get("dynamic")
        if found.format == "gptq":
            key, _ = entry_for(table if isinstance(table, Mapping) else {}, module)
            negated = key is not None and negative(key)
            return "dynamic" if negated else "modules_in_block_to_quantize"
    return next((key for key in _LISTS if config.get(key)), "lm_head")


def check_dense_list(subject: Subject) -> Iterator[Finding]:
    """dense-list: what the config calls dense is, and nothing else."""
    if subject.artifact.found.format == "dense":
        return
    config = quantization_config(subject.artifact.checkpoint)
    wrong = [*skip_lists.malformed(config)]
    yield from wrong
    silent = all(config.get(key) is None for key in _LISTS) and not config.get("config_groups")
    linears = [e for e in subject.linears if e.scheme is None]
    heads = [e for e in subject.entries.values() if is_head(e.module) and e.scheme is None]
    if subject.artifact.found.format not in _WITH_HEADS:
        heads = []
    said = {e.module: says_dense(subject, e.module) for e in subject.entries.values()}
    unknown = [module for module, answer in said.items() if answer is None]
    if unknown and not wrong:  # which is why
        yield Finding(
            "note", CHECK, unknown[0],
            f"whether the config leaves {counted(len(unknown), 'module')} ({some(unknown)}) "
            "unquantized depends on an expression that is not matched here; it was not checked",
        )  # fmt: skip
    dense = [e.module for e in (*linears, *heads) if said[e.module] is False]
    experts = [module for module in dense if experts_of(module)]
    stacks = [n for n, role in subject.roles.items() if role.reason == FUSED_EXPERTS]
    stacks = [n for n in stacks if subject.entries[n].scheme is None]
    experts += [n for n in stacks if says_dense(subject, fused_layer(n)) is False]
    if experts:
        yield Finding(
            "error", CHECK, experts[0],
            f"{counted(len(experts), 'matrix')} of experts are stored unquantized, and the config "
            f"does not say so: {some(experts)}; quantize them, or name them as left out",
            of_listed(experts),
        )  # fmt: skip
    others = [module for module in dense if not experts_of(module)]
    if others:
        tail = (
            "the config names no layer as left out: engines that do not look into the headers "
            "will ask for codes"
            if silent
            else "by the config they are quantized, so engines will ask for codes"
        )
        yield Finding(
            "warning" if silent else "error", CHECK, others[0],
            f"{counted(len(others), 'linear layer')} stored unquantized: {some(others)}; {tail}",
            of_listed(others),
        )  # fmt: skip
    packed: dict[str, list[str]] = defaultdict(list)  # by what is to blame
    for entry in subject.entries.values():
        if entry.scheme is not None and said[entry.module]:
            packed[_key_for(subject, entry.module)].append(entry.module)
    for key, modules in packed.items():
        yield Finding(
            "error", CHECK, modules[0],
            f"{counted(len(modules), 'matrix')} stored quantized, and by the config ({key}) left "
            f"unquantized: {some(modules)}; engines will ask for a weight that is not there",
            of_listed(modules),
        )  # fmt: skip

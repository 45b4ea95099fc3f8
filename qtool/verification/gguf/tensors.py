"""The tensors of a GGUF file against its architecture: llama.cpp makes its own from the metadata,
and refuses a file that lacks one, or that has one of another shape.
"""

import re
from collections.abc import Iterator
from typing import Any

from qtool.errors import QtoolError
from qtool.formats.gguf_file import INTEGERS
from qtool.formats.gguf_values import Kind, Value
from qtool.gguf.architectures import TABLE, Architecture
from qtool.gguf.architectures.modules import HEADS
from qtool.gguf.architectures.shapes import expected_shape
from qtool.gguf.from_hf.source import gguf_names
from qtool.gguf.source import GgufSource
from qtool.gguf.to_hf.blocks import WITH_STATES, put_layer_types, put_state_spaces
from qtool.gguf.to_hf.classes import class_of
from qtool.gguf.to_hf.config import has_way_back, hf_config
from qtool.gguf.to_hf.gemma4 import put_blocks
from qtool.gguf.to_hf.keys import one_for_all
from qtool.gguf.to_hf.latent import put_whole_latents
from qtool.gguf_mixtures.kinds import layer_of, stored_shape
from qtool.messages.sentences import count as counted
from qtool.messages.sentences import some
from qtool.verification.finding import Finding

_COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "num_experts": "expert_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_value_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "mtp_num_hidden_layers": "nextn_predict_layers",
    "q_lora_rank": "attention.q_lora_rank",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
}
# Tensors that llama.cpp takes in place of several.
_INSTEAD = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "attn_kv_b": ("attn_k_b", "attn_v_b"),
    "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
    "ssm_in": ("attn_qkv", "attn_gate"),
}
# Whose blocks differ in more than their keys tell by themselves.
_TOLD_BY_ALL = ("mimo2", "qwen4exp", "laguna", "kimi-linear", "dots3note", "minimax-m3",
                "glm5-next", "step35", "deepseek4", "minimax-01", "bailingmoe3")  # fmt: skip
_BARE_BLOCKS = ("deci",)  # of which a file does not tell what each has, and one may have nothing
_BLOCK = re.compile(r"^blk[.][0-9]+[.]")


def row_of(source: GgufSource) -> Architecture | None:
    """The architecture's row of the table, None for one that is not in it."""
    try:
        return TABLE[class_of(source)]
    except QtoolError:
        return None


def integer(source: GgufSource, name: str) -> int | None:
    value = source.metadata.get(f"{source.architecture}.{name}")
    value = None if value is None else one_for_all(value)
    return int(value.value) if value is not None and value.kind in INTEGERS else None


def sizes(source: GgufSource) -> dict[str, Any]:
    """The settings that shapes follow from, under their names in config.json."""
    found: dict[str, Any] = {}
    row = row_of(source)
    own = {} if row is None else {k.setting: k.name for k in row.keys if k.make is None}
    for setting, key in {**_SIZES, **own}.items():
        value = integer(source, key)
        if value is not None:
            found[setting] = value
    if row is not None and row.mtp:
        found["num_hidden_layers"] -= found.get(row.mtp, 0)
    if f"{source.architecture}.attention.head_count_kv" not in source.metadata:
        found["num_key_value_heads"] = found.get("num_attention_heads")
    if found.get("q_lora_rank") == 0:
        del found["q_lora_rank"]  # there are none
    if "qk_rope_head_dim" in found:
        whole = integer(source, "attention.key_length_mla") or 0
        found["qk_nope_head_dim"] = whole - found["qk_rope_head_dim"]
    rows = {tensor.name: tensor.rows for tensor in source.tensors}
    found["vocab_size"] = rows.get("token_embd.weight")
    return found


def _given(source: GgufSource) -> dict[str, Value]:
    """The keys of the architecture by their names without its own."""
    prefix = f"{source.architecture}."
    return {
        name.removeprefix(prefix): value
        for name, value in source.metadata.items()
        if name.startswith(prefix)
    }


def _settings(row: Architecture, source: GgufSource) -> dict[str, Any] | None:
    """What names and shapes follow from, None where a file does not tell."""
    if row.name in (*_TOLD_BY_ALL, *_BARE_BLOCKS):
        there = has_way_back(row.name)
        return row.completed(hf_config(source, {}, "float32")) if there else None
    settings, given = sizes(source), _given(source)
    if "expert_used_count" in given and given["expert_used_count"].kind == Kind.ARRAY:
        return None  # of Nemotron 3 Puzzle, whose experts differ by block
    tensors = {tensor.name for tensor in source.tensors}
    put_layer_types(row, settings, given)
    if row.name in WITH_STATES:
        put_state_spaces(settings, given, tensors)
    if row.name == "minicpm3":
        put_whole_latents(settings, given)
    if row.name == "gemma4":
        put_blocks(settings, given, tensors, source)
        settings["enable_moe_block"] = "blk.0.ffn_gate_inp.weight" in tensors
    return settings if row.settle is None else row.completed(settings)


def check_tensors(source: GgufSource) -> Iterator[Finding]:
    """tensors: every block is there, and of a known architecture every tensor with its shape."""
    tensors = {tensor.name: tensor for tensor in source.tensors}
    blocks = integer(source, "block_count")
    if blocks is None or not 0 < blocks < 1 << 16:
        return  # said by `keys`
    there = {layer_of(name) for name in tensors}
    empty = [f"blk.{n}" for n in range(blocks) if n not in there]
    lost = [] if "token_embd.weight" in tensors else ["token_embd.weight"]
    row = row_of(source)
    if row is None:
        if empty or lost:
            yield _missing([*lost, *empty], source.architecture)
        return
    try:
        settings = _settings(row, source)
        if settings is None:
            lost += [] if row.name in _BARE_BLOCKS else empty
            if lost:
                yield _missing(lost, row.name)
            return
        names = gguf_names(row, settings)
        unread = {f"{name}.weight" for name in gguf_names(row.passed_over, settings).values()}
    except QtoolError:
        return  # said by `keys`
    modules = {module.name: module for module in row.modules}
    for (name, block), gguf_name in names.items():
        module, first = modules[name], modules[name].ends[0][0]
        head = name in HEADS
        needed = (module.required(settings) and not head) or (head and row.needs_head)
        # llama.cpp goes without blocks of multi-token prediction.
        needed = needed and (block < settings["num_hidden_layers"] or block in there)
        if needed and gguf_name + first not in tensors and gguf_name != "token_embd":
            lost.append(gguf_name + first)
        for suffix, _ in module.ends:
            tensor = tensors.get(gguf_name + suffix)
            if tensor is None:
                continue
            try:
                expected = expected_shape(module, settings, suffix, block)
            except QtoolError:
                continue  # sizes that differ by block, or are not said
            if expected is not None and stored_shape(expected) != stored_shape(tensor.shape):
                yield Finding(
                    "error", "tensors", tensor.name,
                    f"{tensor.name} is {list(tensor.shape)}, and by the metadata it should be "
                    f"{list(expected)}; llama.cpp refuses it: make the file again",
                )  # fmt: skip
    lost = [name for name in lost if tensors.keys().isdisjoint(_in_its_place(name))]
    if lost:
        yield _missing(lost, row.name)
    known = {name + suffix for name in names.values() for suffix in (".weight", ".bias", ".scale")}
    known |= {name + suffix for (n, _), name in names.items() for suffix, _ in modules[n].ends}
    known |= {whole for name in names.values() for whole in _in_its_place(name)}
    known |= {*_COMPUTED, *unread}
    extra = [name for name in tensors if name not in known]
    places = _places(row.names or row.name)
    beyond = [name for name in extra if layer_of(name) >= blocks]
    extra = [name for name in extra if name not in beyond and _place(name) not in places]
    if beyond:
        yield Finding(
            "error", "tensors", beyond[0],
            f"{counted(len(beyond), 'tensor')} of blocks beyond the {blocks} that "
            f"{source.architecture}.block_count says: {some(beyond)}; llama.cpp refuses a file "
            "with more tensors than it asks for: make it again",
        )  # fmt: skip
    if extra:
        yield Finding(
            "warning", "tensors", extra[0],
            f"{counted(len(extra), 'tensor')} that {row.name} has no place for: {some(extra)}",
        )  # fmt: skip


def _in_its_place(name: str) -> list[str]:
    """The tensors, one of which may hold a matrix among others."""
    start, dot, last = name.removesuffix(".weight").rpartition(".")
    return [f"{start}{dot}{one}.weight" for one, parts in _INSTEAD.items() if last in parts]


def _places(architecture: str) -> set[str]:
    """The names of all tensors that the gguf package knows of an architecture; other models of its
    kind have some that no row of the table has."""
    from gguf.constants import MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES

    number = {name: number for number, name in MODEL_ARCH_NAMES.items()}[architecture]
    return {TENSOR_NAMES[tensor] for tensor in MODEL_TENSORS[number]}


def _place(name: str) -> str:
    """A tensor's name as in that list."""
    return _BLOCK.sub("blk.{bid}.", name.rpartition(".")[0])


def _missing(names: list[str], architecture: str) -> Finding:
    return Finding(
        "error", "tensors", names[0],
        f"{counted(len(names), 'tensor')} that {architecture} needs "
        f"{'is' if len(names) == 1 else 'are'} missing: {some(names)}; fetch or make the file "
        "again",
    )  # fmt: skip

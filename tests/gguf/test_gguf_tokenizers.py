"""The tokenizer keys of GGUF from Hugging Face files, small ones made by hand."""

import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from qtool.errors import UnsupportedError
from qtool.formats.gguf_values import Kind, array, boolean, string, u32
from qtool.gguf.tokenizer import bytelevel, pre_hashes, pretokenizers
from qtool.gguf.tokenizer.keys import tokenizer_metadata
from support.models import small_tokenizers as small
from support.models.small_tokenizers import SIZE, keys_of

T = "tokenizer.ggml."
CONFIG = {"bos_token": "<|end|>", "eos_token": {"content": "<|end|>"}}
SPM_CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}


def test_bpe_keys(tmp_path: Path) -> None:
    """Types, padding, space signs and order are the converter's."""
    extra = [
        small.added(SIZE, "<|turn|>", special=False),  # looks special
        small.added(SIZE + 1, f"{small.SPACE}{small.SPACE}", special=False, normalized=True),
        small.added(SIZE + 2, "ĠĠĠ", special=False),  # decoded: three spaces
        small.added(SIZE + 3, "<s p>"),
    ]
    files = {
        "tokenizer.json": small.bpe(extra=extra),
        "tokenizer_config.json": CONFIG | {"chat_template": "{{ x }}", "add_bos_token": True},
    }
    keys = keys_of(tmp_path, files, size=SIZE + 6, pad_token_id=3, eos_token_id=7)
    names = "model pre tokens token_type merges bos_token_id eos_token_id padding_token_id"
    order = [T + name for name in names.split()] + [T + "add_bos_token", "tokenizer.chat_template"]
    assert list(keys) == order
    assert keys[T + "model"] == string("gpt2")
    assert keys[T + "pre"] == string("gpt-2")
    tokens, types = keys[T + "tokens"], keys[T + "token_type"]
    assert (tokens.kind, tokens.element) == (Kind.ARRAY, Kind.STRING)
    assert (types.kind, types.element) == (Kind.ARRAY, Kind.INT32)
    assert tokens.value[:3] == ["<|end|>", bytelevel.CHARACTER[0], bytelevel.CHARACTER[1]]
    assert tokens.value[SIZE:] == [
        "<|turn|>", "  ", "   ", "<s p>", f"[PAD{SIZE + 4}]", f"[PAD{SIZE + 5}]",
    ]  # fmt: skip
    assert types.value == [3] + [1] * (SIZE - 1) + [3, 4, 4, 3, 5, 5]
    assert keys[T + "merges"].value == small.MERGES
    assert keys[T + "bos_token_id"] == keys[T + "eos_token_id"] == u32(0)
    assert keys[T + "padding_token_id"] == u32(3)
    assert keys[T + "add_bos_token"] == boolean(True)
    assert keys["tokenizer.chat_template"] == string("{{ x }}")


def test_merges_in_both_forms(tmp_path: Path) -> None:
    """Pairs since tokenizers 0.20, with a space within a token; texts before."""
    pairs = small.bpe()
    pairs["model"]["vocab"] |= {"a b": SIZE, " ": SIZE + 1, " b": SIZE + 2}
    pairs["model"]["merges"] += [[" ", "b"], ["a", " b"]]
    keys = keys_of(tmp_path / "pairs", {"tokenizer.json": pairs}, size=SIZE + 3)
    assert keys[T + "merges"].value == [*small.MERGES, "Ġ b", "a Ġb"]
    texts = small.bpe(merges=small.MERGES)
    assert (
        keys_of(tmp_path / "texts", {"tokenizer.json": texts})[T + "merges"].value == small.MERGES
    )


def test_tokens_that_transformers_adds(tmp_path: Path) -> None:
    """A named special token in the vocabulary is an added one; one that is not gets the next id."""
    files = {
        "tokenizer.json": small.bpe(),
        "tokenizer_config.json": {
            "eos_token": "he", "pad_token": "[P]", "extra_special_tokens": {"image": "<i>"},
            "added_tokens_decoder": {str(SIZE): {"content": "<t>", "special": False}},
        },
    }  # fmt: skip
    keys = keys_of(tmp_path, files, size=SIZE + 3)
    assert keys[T + "tokens"].value[SIZE:] == ["<t>", "[P]", "<i>"]
    assert keys[T + "token_type"].value[SIZE:] == [4, 3, 3]
    assert keys[T + "token_type"].value[keys[T + "tokens"].value.index("he")] == 3


def _template(*single: str, pair: tuple[str, ...] = ()) -> dict[str, Any]:
    def item(name: str) -> dict[str, Any]:
        kind = "Sequence" if name in "AB" else "SpecialToken"
        return {kind: {"id": name, "type_id": 0}}

    return {
        "type": "TemplateProcessing", "single": list(map(item, single)),
        "pair": list(map(item, pair)), "special_tokens": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("processor", "config", "wanted"),
    [
        (None, {}, {}),
        (small.byte_level(), {}, {"bos": False, "eos": False}),
        (small.byte_level(), {"add_bos_token": True}, {"bos": False, "eos": False}),
        (None, {"add_bos_token": True, "add_eos_token": False}, {"bos": True, "eos": False}),
        (_template("<|end|>", "A"), {}, {"bos": True}),
        (_template("<|end|>", "A"), {"bos_token": {"content": "<|end|>"}}, {"bos": True}),
        (_template("<|end|>", "A", pair=("<|end|>", "A", "<|end|>", "B")), {},
         {"bos": True, "sep": True}),
        (_template("A", "<|end|>"), {}, {"eos": True}),
        (_template("<|end|>", "A", "<|end|>"), {"bos_token": "x"}, {"bos": True, "eos": True}),
        ({"type": "Sequence", "processors": [small.byte_level(), _template("<|end|>", "A")]}, {},
         {"bos": True, "eos": False}),
        ({"type": "RobertaProcessing", "cls": ["<|end|>", 0], "sep": ["<|end|>", 0]}, {},
         {"bos": True, "eos": True, "sep": True}),
    ],
)  # fmt: skip
def test_what_is_added_around_a_text(
    processor: Any, config: dict[str, Any], wanted: dict[str, bool], tmp_path: Path
) -> None:
    data = small.bpe() | {"post_processor": processor}
    files = {"tokenizer.json": data, "tokenizer_config.json": CONFIG | config}
    keys = keys_of(tmp_path, files, size=SIZE + 1)
    found = {key: value for key, value in keys.items() if key.startswith(T + "add_")}
    assert found == {f"{T}add_{name}_token": boolean(value) for name, value in wanted.items()}


def test_an_end_that_is_not_the_named_one(tmp_path: Path) -> None:
    """The token that ends a text is eos; the named one then ends a turn."""
    data = small.bpe(extra=[small.added(SIZE, "<|stop|>")])
    data["post_processor"] = _template("A", "<|stop|>")
    files = {"tokenizer.json": data, "tokenizer_config.json": CONFIG}
    keys = keys_of(tmp_path, files, size=SIZE + 1)
    assert keys[T + "eos_token_id"] == u32(SIZE)
    assert keys[T + "eot_token_id"] == u32(0)
    assert keys[T + "add_eos_token"] == boolean(True)


def test_ids_that_mean_none(tmp_path: Path) -> None:
    """-1, lists and ids beyond the embedding are no ids; text_config is asked too."""
    files = {"tokenizer.json": small.bpe()}
    config = {"bos_token_id": -1, "eos_token_id": [1, 2], "pad_token_id": SIZE}
    keys = keys_of(tmp_path, files, **config, text_config={"eos_token_id": 9, "unk_token_id": 4})
    assert {k: v.value for k, v in keys.items() if k.endswith("_id")} == {T + "unknown_token_id": 4}


def test_chat_templates(tmp_path: Path) -> None:
    """Named ones have keys of their own; chat_template.jinja counts where the config has none."""
    named = [
        {"name": "default", "template": "d"}, {"name": "tool-use", "template": "t"},
        {"name": "rag", "template": "r"}, {"name": "", "template": "nobody's"},
    ]  # fmt: skip
    base = {"tokenizer.json": small.bpe()}
    keys = keys_of(tmp_path / "a", base | {"tokenizer_config.json": {"chat_template": named}})
    assert {k: v.value for k, v in keys.items() if "chat" in k} == {
        "tokenizer.chat_template.tool_use": "t",
        "tokenizer.chat_template.rag": "r",
        "tokenizer.chat_templates": ["tool_use", "rag"],
        "tokenizer.chat_template": "d",
    }
    files = base | {"tokenizer_config.json": {"x": 1}, "chat_template.jinja": "j é"}
    assert keys_of(tmp_path / "b", files)["tokenizer.chat_template"] == string("j é")
    small.save(tmp_path / "b/additional_chat_templates", {"more.jinja": "m"})
    keys = keys_of(tmp_path / "b", files)
    assert keys["tokenizer.chat_template.more"] == string("m")
    assert keys["tokenizer.chat_template"] == string("j é")
    files = base | {"tokenizer_config.json": {"x": 1}, "chat_template.json": {"chat_template": "c"}}
    assert keys_of(tmp_path / "c", files)["tokenizer.chat_template"] == string("c")


def test_architectures(tmp_path: Path) -> None:
    """What llama.cpp's converter writes by the architecture alone."""
    files = {
        "tokenizer.json": small.bpe(),
        "tokenizer_config.json": {"add_prefix_space": False, "add_bos_token": True},
    }
    assert T + "add_space_prefix" not in keys_of(tmp_path, files, "olmo2")
    keys = keys_of(tmp_path, files, "llama")
    assert next(iter(keys)) == T + "add_space_prefix"
    assert keys[T + "add_bos_token"] == boolean(True)
    keys = keys_of(tmp_path, files, "granite", 49152)
    assert keys[T + "add_bos_token"] == boolean(False)
    assert keys_of(tmp_path, files, "llama", 32016)[T + "eot_token_id"] == u32(32010)
    spm = {"tokenizer.model": small.sentencepiece()}
    keys = keys_of(tmp_path / "spm", spm, "gemma", 300)
    assert keys[T + "add_space_prefix"] == boolean(False)
    assert keys[T + "eot_token_id"] == u32(107)
    keys = keys_of(tmp_path / "spm", spm, "gemma3", 300)
    assert T + "eot_token_id" not in keys and list(keys)[-1] == T + "add_space_prefix"
    assert T + "add_space_prefix" not in keys_of(tmp_path / "spm", spm, "llama", 300)
    # Phi-4 mini is byte-level, whatever lies beside it.
    both = files | {"tokenizer.model": small.sentencepiece()}
    keys = keys_of(tmp_path / "phi3", both, "phi3")
    assert keys[T + "model"] == string("llama")
    both["tokenizer_config.json"] = {"tokenizer_class": "GPT2Tokenizer"}
    assert keys_of(tmp_path / "phi4", both, "phi3")[T + "model"] == string("gpt2")
    # Llama 3's tokenizer.model is a list of words.
    both["tokenizer.model"] = b"IQ== 0\nIg== 1\n"
    assert keys_of(tmp_path / "llama3", both, "llama")[T + "model"] == string("gpt2")


def test_sentencepiece_keys(tmp_path: Path) -> None:
    entries = small.pieces()
    files = {
        "tokenizer.model": small.sentencepiece([*entries, ("zz", -3.5, 4), ("old", -7.0, 5)]),
        "added_tokens.json": {"<new>": len(entries) + 2, "<far>": 1000},
        "tokenizer_config.json": SPM_CONFIG | {"added_tokens_decoder": {
            "2": {"content": "</s>", "special": True},
            str(len(entries) + 3): {"content": f"<a{small.SPACE}b>", "special": False},
            "2000": {"content": "<image>", "special": True},
        }},
    }  # fmt: skip
    size = len(entries) + 5
    keys = keys_of(tmp_path, files, "llama", size, bos_token_id=1)
    names = "model pre tokens scores token_type bos_token_id add_bos_token"
    assert list(keys) == [T + name for name in names.split()]
    assert keys[T + "model"] == string("llama")
    assert keys[T + "pre"] == string("default")
    assert keys[T + "scores"].element is Kind.FLOAT32
    rows = list(
        zip(*(keys[T + name].value for name in ("tokens", "scores", "token_type")), strict=True)
    )
    assert rows[:2] == entries[:2]
    assert rows[2] == ("</s>", -1000.0, 3)
    assert rows[3 : len(entries)] == entries[3:]
    assert rows[len(entries) :] == [
        ("zz", -3.5, 1), ("old", -7.0, 5), ("<new>", -1000.0, 4), ("<a b>", -1000.0, 4),
        (f"[PAD{size - 1}]", -10000.0, 5),
    ]  # fmt: skip
    # Phi-3 takes the added tokens of tokenizer.json, and their texts as they are.
    data = {"model": {"vocab": {}}, "added_tokens": [small.added(0, "<|end|>", special=False)]}
    keys = keys_of(tmp_path, files | {"tokenizer.json": data}, "phi3", size)
    assert keys[T + "tokens"].value[0] == "<|end|>"
    assert keys[T + "token_type"].value[0] == 4
    assert keys[T + "tokens"].value[size - 2] == f"<a{small.SPACE}b>"


def test_unigram_keys(tmp_path: Path) -> None:
    """Without byte tokens it is t5, which finds the best path; with them, the converter's llama."""
    entries = small.unigram_pieces()
    model = small.sentencepiece(entries, model_type=1, fallback=0, charsmap=bytes(range(9)))
    keys = keys_of(tmp_path, {"tokenizer.model": model}, "llama", len(entries))
    assert keys[T + "model"] == string("t5")
    assert keys[T + "add_space_prefix"] == boolean(True)
    assert keys[T + "remove_extra_whitespaces"] == boolean(False)
    assert keys[T + "precompiled_charsmap"] == array(Kind.UINT8, list(range(9)))
    assert keys[T + "add_eos_token"] == boolean(False)
    assert keys[T + "unknown_token_id"] == u32(0)
    model = small.sentencepiece(model_type=1, fallback=1)
    keys = keys_of(tmp_path, {"tokenizer.model": model}, "llama", len(small.pieces()))
    assert keys[T + "model"] == string("llama")


def test_fingerprint() -> None:
    """The text that llama.cpp's converter encodes, and the names it knows."""
    digest = "a36179c1e2b1cfcf"
    assert sha256(pre_hashes.TEXT.encode()).hexdigest()[:16] == digest
    known = {name for row in pretokenizers.TABLE for name in row.names}
    assert set(pre_hashes.NAMES.values()) <= known
    assert all(len(key) == 16 for key in pre_hashes.NAMES)


def test_fingerprint_tells_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that cuts alike is taken; one that cuts otherwise is not what the text can tell."""
    data = small.bpe()
    ids = Tokenizer.from_str(json.dumps(data)).encode(pre_hashes.TEXT).ids
    files = {"tokenizer.json": data, "tokenizer_config.json": CONFIG | {"add_bos_token": True}}
    digest = sha256(str([0, *ids]).encode()).hexdigest()[:16]
    monkeypatch.setitem(pre_hashes.NAMES, digest, "phi-2")
    assert keys_of(tmp_path, files)[T + "pre"] == string("phi-2")
    monkeypatch.setitem(pre_hashes.NAMES, digest, "qwen2")
    assert keys_of(tmp_path, files)[T + "pre"] == string("gpt-2")


def test_unknown_pre_tokenizer(tmp_path: Path) -> None:
    odd = {"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Isolated", "invert": False}
    files = {"tokenizer.json": small.bpe(pre={"type": "Sequence", "pretokenizers": [odd]})}
    with pytest.raises(UnsupportedError, match=r"tokenizer\.json: its pre_tokenizer is none of"):
        keys_of(tmp_path, files)
    keys = tokenizer_metadata(tmp_path, "olmo2", SIZE, {}, pre="llama-bpe")
    assert keys[T + "pre"] == string("llama-bpe")


def test_spellings_of_a_pre_tokenizer(tmp_path: Path) -> None:
    """Line ends written out or escaped, contractions in either form."""
    for regex in (
        small.LLAMA3,
        small.LLAMA3.replace(r"\r\n", "\r\n"),
        small.LLAMA3.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'(?i:[sdmt]|ll|ve|re)"),
    ):
        split = {
            "type": "Split",
            "pattern": {"Regex": regex},
            "behavior": "Removed",
            "invert": True,
        }
        pre = {"type": "Sequence", "pretokenizers": [split, small.byte_level(use_regex=False)]}
        for whole, name in ((True, "llama-bpe"), (False, "dbrx")):
            files = {"tokenizer.json": small.bpe(pre=pre, ignore_merges=whole)}
            assert keys_of(tmp_path, files)[T + "pre"] == string(name)


def test_no_library_is_imported(tmp_path: Path) -> None:
    small.save(tmp_path, {"tokenizer.json": small.bpe(), "tokenizer_config.json": CONFIG})
    code = (
        "import sys; from pathlib import Path;"
        "from qtool.gguf.tokenizer.keys import tokenizer_metadata;"
        f"tokenizer_metadata(Path({str(tmp_path)!r}), 'llama', {SIZE}, {{}});"
        "import qtool.gguf.tokenizer.files;"
        "print(sorted({'torch', 'transformers', 'tokenizers', 'pydantic'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr

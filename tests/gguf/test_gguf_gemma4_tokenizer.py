"""Gemma 4's tokenizer as GGUF keys and back: BPE over plain text, a kind of its own."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from qtool.errors import FormatError, UnsupportedError
from qtool.formats.gguf_values import Kind, array, boolean, string
from qtool.gguf.tokenizer.files import tokenizer_files
from qtool.gguf.tokenizer.keys import tokenizer_metadata
from support.models import small_tokenizers as small

T = "tokenizer.ggml."


def test_tokenizer_there_and_back(tmp_path: Path) -> None:
    """Spaces and bytes as tokens, special tokens by either file, and the same ids again."""
    size = len(small.gemma4()["model"]["vocab"])
    files = {
        "tokenizer.json": small.gemma4(extra=[small.added(size, "<late>", special=False)]),
        "tokenizer_config.json": small.GEMMA4_CONFIG,
    }
    folder = small.save(tmp_path / "a", files)
    keys = tokenizer_metadata(folder, "gemma4", size + 2, {})
    names = ("model", "tokens", "scores", "token_type", "merges")
    assert list(keys)[:5] == [T + name for name in names]
    assert keys[T + "model"] == string("gemma4") and keys[T + "add_bos_token"] == boolean(True)
    types = dict(zip(keys[T + "tokens"].value, keys[T + "token_type"].value, strict=True))
    wanted = {"<bos>": 3, "<turn|>": 3, "<|turn>": 3, "<|tool_call>": 4, "<0x0A>": 6, "the": 1}
    assert {text: types[text] for text in wanted} == wanted
    assert (types["<late>"], types[f"[PAD{size + 1}]"]) == (4, 5)
    made = tokenizer_files({"general.architecture": string("gemma4"), **keys})
    again = small.save(tmp_path / "b", made)
    one, two = (Tokenizer.from_file(str(f / "tokenizer.json")) for f in (folder, again))
    text = "the thing and  the   hand\n\n\nis inthe sand, ééŁ 猫<turn|> the<|tool_call> in"
    assert one.encode(text).ids == two.encode(text).ids
    assert two.decode(two.encode(text).ids, skip_special_tokens=False).count("猫") == 1
    files["tokenizer.json"] = small.gemma4()
    keys = tokenizer_metadata(small.save(tmp_path / "c", files), "gemma4", size, {})
    made = tokenizer_files({"general.architecture": string("gemma4"), **keys})
    assert tokenizer_metadata(small.save(tmp_path / "d", made), "gemma4", size, {}) == keys


def test_tokenizers_that_it_does_not_have(tmp_path: Path) -> None:
    plain_bpe = small.save(tmp_path / "a", {"tokenizer.json": small.bpe()})
    with pytest.raises(UnsupportedError, match="no BPE that falls back to bytes"):
        tokenizer_metadata(plain_bpe, "gemma4", small.SIZE, {})
    cut = small.gemma4() | {"pre_tokenizer": small.byte_level()}
    with pytest.raises(UnsupportedError, match=r"more to a text than to spell spaces U\+2581"):
        tokenizer_metadata(small.save(tmp_path / "c", {"tokenizer.json": cut}), "gemma4", 300, {})
    folder = small.save(tmp_path / "b", {"tokenizer.json": small.gemma4()})
    with pytest.raises(FormatError, match="but the embedding has 10 rows"):
        tokenizer_metadata(folder, "gemma4", 10, {})


def test_tokens_that_the_unified_model_never_says(tmp_path: Path) -> None:
    said = {"suppress_tokens": [3, 4, 10**6, "x"]}
    folder = small.save(
        tmp_path, {"tokenizer.json": small.gemma4(), "generation_config.json": said}
    )
    for name in ("Gemma4UnifiedForConditionalGeneration", "Gemma4ForCausalLM"):
        keys = tokenizer_metadata(folder, "gemma4", 300, {"architectures": [name]})
        wanted = array(Kind.INT32, [3, 4]) if "Unified" in name else None
        assert keys.get(T + "suppress_tokens") == wanted

"""Tokenizer files made from GGUF keys: the same keys again, and the same tokens of a text."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from qtool.formats.gguf_values import boolean, string, u32
from qtool.gguf.tokenizer import pre_hashes, pretokenizers
from qtool.gguf.tokenizer.files import tokenizer_files
from qtool.gguf.tokenizer.hf_json import bpe_vocabulary
from qtool.gguf.tokenizer.keys import OVERRIDES, tokenizer_metadata
from support.gguf.tokenizer_page import PAGE
from support.models import small_tokenizers as small
from support.models.small_tokenizers import SIZE, keys_of

T = "tokenizer.ggml."
CONFIG = {"bos_token": "<|end|>", "eos_token": {"content": "<|end|>"}}
SPM_CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}


def _by_score(entries: list[tuple[str, float, int]], text: str) -> list[int]:
    """SentencePiece's BPE: the adjacent pair whose union scores best, the leftmost of equals."""
    order = {piece[0]: number for number, piece in enumerate(entries)}
    scores = {text: score for text, score, kind in entries if kind == 1}
    parts = list(small.SPACE + text.replace(" ", small.SPACE))
    while True:
        unions = ["".join(pair) for pair in pairwise(parts)]
        pairs = [(-scores[union], i) for i, union in enumerate(unions) if union in scores]
        if not pairs:
            break
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    spelled = [[p] if p in order else [f"<0x{b:02X}>" for b in p.encode()] for p in parts]
    return [order[piece] for part in spelled for piece in part]


TEXT = "the thing and  the   hand\nis inthe sand, ééŁ 猫 the"


def test_sentencepiece_there_and_back(tmp_path: Path) -> None:
    """Made again, the files hold the same keys, and tokenize as the scores tell."""
    entries = small.pieces()
    files = {"tokenizer.model": small.sentencepiece(), "tokenizer_config.json": SPM_CONFIG}
    keys = keys_of(tmp_path / "a", files, "llama", len(entries))
    again = tokenizer_files({"general.architecture": string("llama"), **keys})
    assert set(again) == {"tokenizer.json", "tokenizer_config.json", "tokenizer.model"}
    assert keys_of(tmp_path / "b", again, "llama", len(entries)) == keys
    tokenizer = Tokenizer.from_file(str(tmp_path / "b/tokenizer.json"))
    assert tokenizer.encode(TEXT).ids == [1, *_by_score(entries, TEXT)]
    assert tokenizer.decode(tokenizer.encode(TEXT).ids) == TEXT
    # Without tokenizer.model scores are told by the merges' order, which is as good.
    (tmp_path / "b/tokenizer.model").unlink()
    lone = tokenizer_metadata(tmp_path / "b", "llama", len(entries), {})
    scored = [(t, s, k) for (t, _, k), s in zip(entries, lone[T + "scores"].value, strict=True)]
    assert _by_score(scored, TEXT) == _by_score(entries, TEXT)
    assert lone[T + "token_type"].value == keys[T + "token_type"].value


@pytest.mark.parametrize("squeeze", [False, True])
def test_unigram_there_and_back(squeeze: bool, tmp_path: Path) -> None:
    entries = small.unigram_pieces()
    model = small.sentencepiece(entries, model_type=1, fallback=0, prefix=1)
    files = {"tokenizer.model": model, "tokenizer_config.json": SPM_CONFIG}
    keys = keys_of(tmp_path / "a", files, "llama", len(entries) + 2)
    keys[T + "remove_extra_whitespaces"] = boolean(squeeze)
    again = tokenizer_files({"general.architecture": string("llama"), **keys})
    assert keys_of(tmp_path / "b", again, "llama", len(entries) + 2) == keys
    encoding = Tokenizer.from_file(str(tmp_path / "b/tokenizer.json")).encode("the  and")
    wanted = ["▁the", "▁and"] if squeeze else ["▁the", "▁", "▁and"]
    assert encoding.tokens == ["<s>", *wanted]
    (tmp_path / "b/tokenizer.model").unlink()
    lone = tokenizer_metadata(tmp_path / "b", "llama", len(entries) + 2, {})
    for name in ("model", "tokens", "add_space_prefix", "remove_extra_whitespaces"):
        assert lone[T + name] == keys[T + name]


@pytest.mark.parametrize("name", sorted({row.names[0] for row in pretokenizers.TABLE}))
def test_each_pre_tokenizer_there_and_back(name: str, tmp_path: Path) -> None:
    """Its steps are recognised again, and the library cuts the page as our own reading of them."""
    row = pretokenizers.find_row(name)
    assert row is not None
    data = small.bpe(pre=pretokenizers.write_steps(name), ignore_merges=row.ignore_merges)
    data["normalizer"] = row.normalizer and {"type": row.normalizer}
    assert pretokenizers.match_row(json.loads(json.dumps(data))) == row
    folder = small.save(tmp_path / "a", {"tokenizer.json": data})
    keys = tokenizer_metadata(folder, "olmo2", SIZE, {})
    assert keys[T + "pre"] == string(name)
    again = tokenizer_files({"general.architecture": string("olmo2"), **keys})
    assert keys_of(tmp_path / "b", again) == keys
    tokenizer = Tokenizer.from_str(again["tokenizer.json"].decode())
    vocabulary = bpe_vocabulary(folder, data, {})
    assert tokenizer.encode(PAGE).ids == pre_hashes.encode(vocabulary, data, PAGE)


def test_what_files_cannot_tell_is_kept(tmp_path: Path) -> None:
    """Another name of the same cutting, ids without a name, and keys that are not there."""
    files = {"tokenizer.json": small.bpe(), "tokenizer_config.json": CONFIG}
    keys = keys_of(tmp_path / "a", files)
    keys |= {T + "pre": string("jais"), T + "eot_token_id": u32(9), T + "fim_sep_token_id": u32(4)}
    made = tokenizer_files({"general.architecture": string("olmo2"), **keys})
    said = json.loads(made["tokenizer_config.json"])
    assert said[OVERRIDES] == {
        T + "pre": "jais", T + "eot_token_id": 9, T + "fim_sep_token_id": 4
    }  # fmt: skip
    assert keys_of(tmp_path / "b", made) == keys
    said[OVERRIDES] |= {T + "tokens": "x", T + "model": "llama", "llama.block_count": 3}
    made["tokenizer_config.json"] = json.dumps(said).encode()
    assert keys_of(tmp_path / "b", made) == keys
    spm = keys_of(tmp_path / "c", {"tokenizer.model": small.sentencepiece()}, "llama", 300)
    made = tokenizer_files({"general.architecture": string("llama"), **spm})
    # llama.cpp adds bos where nothing is said, so the files say it, and remember that.
    assert Tokenizer.from_str(made["tokenizer.json"].decode()).encode("the").ids[0] == 1
    assert json.loads(made["tokenizer_config.json"])[OVERRIDES][T + "add_bos_token"] is None
    assert keys_of(tmp_path / "d", made, "llama", 300) == spm
    assert tokenizer_files({"general.architecture": string("llama")}) == {}
    none = {"general.architecture": string("llama"), T + "model": string("no_vocab")}
    assert tokenizer_files(none) == {}

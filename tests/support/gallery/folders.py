"""Folders: files that are cut, lost or counted twice; heads, tokenizers, prediction layers."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from support.gallery.case import Broken
from support.gallery.packed import without
from support.gallery.parents import HIDDEN, VOCABULARY
from support.gallery.raw import Raw, edited, read, settings, write

INDEX = "model.safetensors.index.json"


def _files(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors"))
    assert len(found) > 2
    return found


def cut(folder: Path) -> None:
    """The download of a shard broke off."""
    path = _files(folder)[1]
    path.write_bytes(path.read_bytes()[:-5000])


def lost(folder: Path) -> None:
    """A shard was never fetched."""
    _files(folder)[-1].unlink()


def page(folder: Path) -> None:
    """What was fetched is the page that says: too many requests."""
    _files(folder)[1].write_text("<html><body>429 Too Many Requests</body></html>\n" * 20)


def twice(folder: Path) -> None:
    """A tensor lies in two shards."""
    first, second = _files(folder)[:2]
    name, stored = next(iter(read(first).items()))
    write(second, read(second) | {name: stored})


def unindexed(folder: Path) -> None:
    """The index does not name a tensor that is there."""
    with settings(folder / INDEX) as index:
        del index["weight_map"]["model.norm.weight"]


def misplaced(folder: Path) -> None:
    """The index gives a tensor to a shard that lacks it."""
    with settings(folder / INDEX) as index:
        where = index["weight_map"]
        names = sorted(set(where.values()))
        where["model.norm.weight"] = next(n for n in names if n != where["model.norm.weight"])


def stray(folder: Path) -> None:
    """Weights of an earlier run are left in the folder."""
    path = _files(folder)[0]
    (folder / "consolidated.safetensors").write_bytes(path.read_bytes())


def whole_beside(folder: Path) -> None:
    """A file of the whole model beside its shards."""
    (folder / "model.safetensors").write_bytes(_files(folder)[0].read_bytes())


def second_head(folder: Path) -> None:
    """A head beside the embedding that it is tied to."""
    with edited(folder) as tensors:
        embedding = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = Raw("F16", embedding.shape, embedding.data, embedding.file)


def other_head(folder: Path) -> None:
    """A head that differs from the embedding that it is tied to."""
    numbers = np.random.default_rng(3).standard_normal((VOCABULARY, HIDDEN)).astype("<f2")
    with edited(folder) as tensors:
        file = tensors["model.embed_tokens.weight"].file
        tensors["lm_head.weight"] = Raw("F16", numbers.shape, numbers.tobytes(), file)


def longer_tokenizer(folder: Path) -> None:
    """Tokens were added, and the embedding was not resized."""
    with settings(folder / "tokenizer.json") as tokenizer:
        tokenizer["added_tokens"] = [
            {"id": VOCABULARY + n, "content": f"<extra_{n}>", "special": True} for n in range(4)
        ]


def no_tokenizer(folder: Path) -> None:
    """Only weights were uploaded."""
    (folder / "tokenizer.json").unlink()


def end(number: int, file: str) -> Callable[[Path], None]:
    """The end of a text is a token that the model does not have."""

    def damage(folder: Path) -> None:
        with settings(folder / file) as content:
            content["eos_token_id"] = number

    return damage


def no_config(folder: Path) -> None:
    """quantization_config got lost when config.json was written anew."""
    with settings(folder / "config.json") as config:
        del config["quantization_config"]
    for name in ("quantize_config.json", "quant_config.json"):
        (folder / name).unlink(missing_ok=True)


def another_record(folder: Path) -> None:
    """qtool.json of another artifact."""
    with settings(folder / "qtool.json") as record:
        record["recipe"]["weights"]["bits"] = 8


def broken_json(folder: Path) -> None:
    """config.json with a comma too many."""
    path = folder / "config.json"
    path.write_text(path.read_text().rstrip().removesuffix("}") + ",}")
    try:
        json.loads(path.read_text())
    except ValueError:
        return
    raise AssertionError


CASES = [
    Broken("shard-cut", "truncated download", "awq", cut, "files", "model-00002",
           "the file is truncated"),
    Broken("shard-lost", "truncated download", "awq", lost, "files", "model-0000",
           "there is no such file"),
    Broken("shard-is-a-page", "truncated download", "gptq", page, "files", "model-00002",
           "a web page, not the file itself"),
    Broken("tensor-in-two-shards", "merged by hand", "awq", twice, "files", "model-0000",
           "another file", severity="warning"),
    Broken("index-forgets-a-tensor", "merged by hand", "awq", unindexed, "files",
           "model.norm.weight", "does not name"),
    Broken("whole-file-beside-shards", "two uploads", "awq", whole_beside, "files",
           "model.safetensors", "transformers reads the one", severity="warning"),
    Broken("index-names-another-shard", "merged by hand", "awq", misplaced, "files",
           "model.norm.weight", "says that model.norm.weight is in"),
    Broken("stray-weights", "merged by hand", "awq", stray, "files", "consolidated.safetensors",
           "does not name it", severity="warning"),
    Broken("tied-head-twice", "llm-compressor#2798", "awq-tied", second_head, "head",
           "lm_head.weight", "a copy of", severity="warning"),
    Broken("tied-head-differs", "sglang#2935", "awq-tied", other_head, "head",
           "lm_head.weight", "differs from", severity="warning"),
    Broken("head-lost", "vllm#45535", "gptq", without("lm_head."), "head", "lm_head.weight",
           "there is no output head"),
    Broken("mtp-lost", "GPTQModel#2643", "awq-mtp", without("model.layers.2."), "against",
           "model.layers.2", "13 tensors of the source .multi-token", against=True),
    Broken("mtp-lost-unseen", "llm-compressor#2735", "awq-mtp", without("model.layers.2."),
           "tensors", "num_nextn_predict_layers", "no such tensors are there", severity="warning"),
    Broken("tokenizer-longer-than-embedding", "resized by hand", "awq", longer_tokenizer,
           "tokenizer", "tokenizer.json", "beyond the 96 rows"),
    Broken("tokenizer-lost", "only weights uploaded", "gptq", no_tokenizer, "tokenizer", "",
           "has no tokenizer", severity="warning"),
    Broken("end-beyond-vocabulary", "generation never ends", "awq", end(32000, "config.json"),
           "tokenizer", "config.json", "eos_token_id 32000"),
    Broken("end-of-generation-config", "generation never ends", "awq",
           end(4096, "generation_config.json"), "tokenizer", "generation_config.json",
           "eos_token_id 4096"),
    Broken("config-forgotten", "saved anew", "awq", no_config, "quantized-config", "config.json",
           "no quantization_config"),
    Broken("zeros-without-a-label", "vllm#38966", "gptq-v2", no_config, "zero-convention", "_proj",
           "the zeros are gptq_v2's"),
    Broken("record-of-another", "copied by hand", "gptq", another_record, "provenance",
           "qtool.json", "weights.bits 8"),
    Broken("config-no-json", "edited by hand", "awq", broken_json, "readable", "config.json",
           "not valid JSON"),
]  # fmt: skip

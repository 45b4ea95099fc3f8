"""Tokenizers between Hugging Face and GGUF, held against llama.cpp and transformers.

QTOOL_ORACLE_LLAMA names the folder of llama.cpp's programs, QTOOL_ORACLE_LLAMA_SOURCE that of its
sources, whose models/ has the vocabularies of real models and, for most, texts with their ids.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from qtool.formats.gguf_file import GgufFile
from qtool.formats.gguf_values import Value, boolean, string
from qtool.formats.gguf_writer import lay_out
from qtool.gguf.tokenizer.bpe import looks_special
from qtool.gguf.tokenizer.files import tokenizer_files
from qtool.gguf.tokenizer.keys import OVERRIDES, tokenizer_metadata
from qtool.gguf.tokenizer.special import TEMPLATES
from support.gguf.tokenizer_page import PAGE

pytestmark = pytest.mark.oracle

BPE = (
    "aquila", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "gpt-neox",
    "llama-bpe", "mpt", "qwen2", "qwen35", "refact", "starcoder",
)  # fmt: skip
SPM = ("baichuan", "llama-spm", "phi-3")
ALL = (*BPE, *SPM, "nomic-bert-moe", "gemma-4")
# Made before the converter knew that <|...|> is special whatever the file says.
OLD_TYPES = ("command-r", "deepseek-coder")
# llama.cpp's fingerprint cannot tell mpt from olmo, nor qwen35's vocabulary with qwen2's tokens;
# the files of aquila and gpt-neox name none, so that the converter would refuse them.
NOT_BY_CONVERTER = ("aquila", "gpt-neox", "qwen35", "nomic-bert-moe", "baichuan")
CHAT = "{0}user\n  Hi {0} there{1}\n{1}  {0}assistant \n"

Keys = Mapping[str, Value]


def named(variable: str) -> Path:
    folder = os.environ.get(variable)
    if not folder:
        pytest.skip(f"{variable} is not set")
    return Path(folder)


@functools.cache
def stored(name: str) -> dict[str, Value]:
    """All keys of one of the vocabularies."""
    path = named("QTOOL_ORACLE_LLAMA_SOURCE") / "models" / f"ggml-vocab-{name}.gguf"
    with GgufFile.open(path) as file:
        return dict(file.metadata)


def plain(value: Value) -> tuple[Any, ...]:
    content = list(value.value) if value.element is not None else value.value
    return value.kind, value.element, content


def tokenizer_keys(metadata: Keys) -> dict[str, tuple[Any, ...]]:
    return {k: plain(v) for k, v in metadata.items() if k.startswith("tokenizer.")}


def write_files(files: Mapping[str, bytes], folder: Path) -> Path:
    folder.mkdir(parents=True)
    for file, content in files.items():
        (folder / file).write_bytes(content)
    return folder


def forward(folder: Path, metadata: Keys) -> dict[str, Value]:
    size = len(metadata["tokenizer.ggml.tokens"].value)
    return tokenizer_metadata(folder, metadata["general.architecture"].value, size, {})


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """rebuilt(name) -> a folder with the tokenizer's files."""
    root = tmp_path_factory.mktemp("tokenizers")

    @functools.cache
    def make(name: str) -> Path:
        return write_files(tokenizer_files(stored(name)), root / name)

    return make


@functools.cache
def loaded(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def llama_ids(metadata: Keys, keys: Keys, text: str, tmp_path: Path, *options: str) -> list[int]:
    """The ids by llama-tokenize, from a file with these tokenizer keys and no tensors."""
    whole = {k: v for k, v in metadata.items() if not k.startswith("tokenizer.")} | dict(keys)
    (tmp_path / "vocab.gguf").write_bytes(lay_out(whole, []).header)
    (tmp_path / "text").write_bytes(text.encode())
    program = named("QTOOL_ORACLE_LLAMA") / "llama-tokenize"
    command = [str(program), "-m", str(tmp_path / "vocab.gguf"), "-f", str(tmp_path / "text")]
    result = subprocess.run(
        [*command, "--ids", "--log-disable", *options], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-2000:]
    ids = json.loads(result.stdout.strip().splitlines()[-1])
    assert isinstance(ids, list)
    return ids


@pytest.mark.parametrize("name", ALL)
def test_vocabulary_there_and_back_has_the_same_keys(name: str, rebuilt: Any) -> None:
    want = tokenizer_keys(stored(name))
    have = tokenizer_keys(forward(rebuilt(name), stored(name)))
    if name == "aquila":  # byte-level BPE has no scores
        del want["tokenizer.ggml.scores"]
    if name in OLD_TYPES:
        texts = want["tokenizer.ggml.tokens"][2]
        types = (want.pop("tokenizer.ggml.token_type"), have.pop("tokenizer.ggml.token_type"))
        changed = [
            (text, old, new) for text, old, new in zip(texts, types[0][2], types[1][2], strict=True)
            if old != new
        ]  # fmt: skip
        assert changed and all((o, n) == (4, 3) and looks_special(t) for t, o, n in changed)
    assert have == want


@pytest.mark.parametrize("name", ALL)
def test_tokenization_by_transformers_and_llama(name: str, rebuilt: Any, tmp_path: Path) -> None:
    folder = rebuilt(name)
    tokenizer = loaded(folder)
    metadata = stored(name)
    keys = forward(folder, metadata)
    ids = llama_ids(metadata, keys, PAGE, tmp_path)
    assert len(ids) > 400
    assert ids == tokenizer.encode(PAGE)
    assert tokenizer.encode(PAGE, add_special_tokens=False) == llama_ids(
        metadata, keys, PAGE, tmp_path, "--no-bos"
    ) or (name == "nomic-bert-moe")  # which has an eos, too
    texts = metadata["tokenizer.ggml.tokens"].value
    types = metadata["tokenizer.ggml.token_type"].value
    for kind in (3, 4):
        some = [text for text, own in zip(texts, types, strict=True) if own == kind]
        if len(some) > 1:
            chat = CHAT.format(some[0], some[-1])
            assert llama_ids(metadata, keys, chat, tmp_path) == tokenizer.encode(chat), kind


@pytest.mark.parametrize("name", ALL)
def test_tokenization_of_the_known_texts(name: str, rebuilt: Any) -> None:
    path = named("QTOOL_ORACLE_LLAMA_SOURCE") / "models" / f"ggml-vocab-{name}.gguf.inp"
    if not path.is_file():
        pytest.skip("llama.cpp has no texts for it")
    between = "\n__ggml_vocab_test__\n"  # and behind the last one, but of Gemma 4
    texts = path.read_text(encoding="utf-8").removesuffix(between).split(between)
    lines = path.with_suffix(".out").read_text().removesuffix("\n").split("\n")
    assert len(texts) > 40
    tokenizer = loaded(rebuilt(name))
    for text, line in zip(texts, lines, strict=True):
        wanted = [int(number) for number in line.split()]
        assert tokenizer.encode(text, add_special_tokens=False) == wanted, text


@pytest.mark.parametrize("name", SPM)
def test_sentencepiece_without_its_model_file(name: str, rebuilt: Any, tmp_path: Path) -> None:
    folder = tmp_path / "json"
    shutil.copytree(rebuilt(name), folder)
    (folder / "tokenizer.model").unlink()
    llama = stored(name) | {"general.architecture": string("llama")}  # phi3 takes no other file
    keys = forward(folder, llama)
    ids = llama_ids(stored(name), keys, PAGE, tmp_path)
    assert ids == loaded(folder).encode(PAGE)
    ours = keys["tokenizer.ggml.scores"]
    theirs = Value(ours.kind, [-1000.0] * len(ours.value), ours.element)
    flat = keys | {"tokenizer.ggml.scores": theirs}  # as the converter writes it
    assert llama_ids(stored(name), flat, PAGE, tmp_path) != ids


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gemma3", "qwen3"])
def test_sentencepiece_without_a_space_before_the_text(arch: str, tmp_path: Path) -> None:
    metadata = stored("llama-spm") | {
        "general.architecture": string(arch),
        "tokenizer.ggml.add_space_prefix": boolean(False),
    }
    folder = write_files(tokenizer_files(metadata), tmp_path / "files")
    keys = forward(folder, metadata)
    assert tokenizer_keys(keys) == tokenizer_keys(metadata)
    ids = llama_ids(stored("llama-spm"), keys, PAGE, tmp_path)
    assert ids == loaded(folder).encode(PAGE)


@pytest.mark.parametrize(
    "pre",
    ["tekken", "gpt-4o", "deepseek-v3", "dbrx", "stablelm2", "bloom", "viking", "youtu",
     "bailingmoe2"],
)  # fmt: skip
def test_cuts_of_which_there_is_no_vocabulary(pre: str, tmp_path: Path) -> None:
    """Llama 3's vocabulary is cut in other ways: by llama.cpp as by the files made for it."""
    metadata = stored("llama-bpe") | {"tokenizer.ggml.pre": string(pre)}
    folder = write_files(tokenizer_files(metadata), tmp_path / "files")
    page = PAGE
    if pre in (
        "tekken",
        "gpt-4o",
        "youtu",
    ):  # llama.cpp's regular expression forgets combining marks
        page = "".join(line for line in PAGE.splitlines(keepends=True) if "नमस्ते" not in line)
    ids = llama_ids(metadata, metadata, page, tmp_path, "--no-bos")
    assert ids == loaded(folder).encode(page, add_special_tokens=False)


def _converted(jobs: list[tuple[Path, Path]]) -> list[list[list[Any]]]:
    """The keys that the converter writes for each folder."""
    source = named("QTOOL_ORACLE_LLAMA_SOURCE")
    script = Path(__file__).parent / "readers" / "convert_vocab.py"
    request = {"source": str(source), "jobs": [[str(a), str(b)] for a, b in jobs]}
    command = [sys.executable, str(script), json.dumps(request)]
    result = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads(out.read_text()) for _, out in jobs]


def _listed(keys: Keys) -> list[list[Any]]:
    """Keys as convert_vocab.py prints them."""
    return [
        [key, int(v.kind), None if v.element is None else int(v.element), plain(v)[2]]
        for key, v in keys.items()
    ]


_CLASSES = {
    "olmo2": ("Olmo2ForCausalLM", "olmo2"),
    "llama": ("LlamaForCausalLM", "llama"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma": ("GemmaForCausalLM", "gemma"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "gemma4": ("Gemma4ForCausalLM", "gemma4_text"),
    "starcoder": ("GPTBigCodeForCausalLM", "gpt_bigcode"),
    "minicpm3": ("MiniCPM3ForCausalLM", "minicpm3"),
    "minicpm": ("MiniCPMForCausalLM", "minicpm"),
    "granite_swa": ("GraniteSWAForCausalLM", "granite_swa"),
    "exaone": ("ExaoneForCausalLM", "exaone"),
    "bailingmoe2": ("BailingMoeV2ForCausalLM", "bailing_moe"),
    "smallthinker": ("SmallThinkerForCausalLM", "smallthinker"),
    "llama of InternLM": ("InternLM3ForCausalLM", "internlm3"),
}
_CONVERTED = (
    *((name, "olmo2") for name in BPE if name not in NOT_BY_CONVERTER),
    ("llama-bpe", "llama"), ("gpt-2", "llama"), ("qwen2", "qwen2"), ("llama-spm", "llama"),
    ("llama-spm", "gemma2"), ("llama-spm", "gemma"), ("phi-3", "phi3"), ("phi-3", "llama"),
    ("gemma-4", "gemma4"), ("starcoder", "starcoder"), ("llama-spm", "minicpm3"),
    ("llama-spm", "minicpm"), ("refact", "granite_swa"), ("gpt-2", "exaone"),
    ("llama-bpe", "bailingmoe2"), ("qwen2", "smallthinker"), ("llama-spm", "llama of InternLM"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "arch"), _CONVERTED)
def test_keys_of_the_converter(name: str, arch: str, rebuilt: Any, tmp_path: Path) -> None:
    """Every key, its kind, value and place are the converter's, for real tokenizers."""
    folder = tmp_path / "files"
    shutil.copytree(rebuilt(name), folder)
    said = json.loads((folder / "tokenizer_config.json").read_text())
    said.pop(OVERRIDES, None)  # only qtool reads it
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    columns = [
        list(stored(name)[f"tokenizer.ggml.{column}"].value)
        for column in ("tokens", "scores", "token_type")
        if name in SPM
    ]
    (folder / "pieces.json").write_text(json.dumps(list(zip(*columns, strict=True))))
    config = {
        "architectures": [_CLASSES[arch][0]], "model_type": _CLASSES[arch][1],
        "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4,
        "vocab_size": len(stored(name)["tokenizer.ggml.tokens"].value),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    [wanted] = _converted([(folder, tmp_path / "wanted.json")])
    arch = arch.partition(" ")[0]
    have = _listed(tokenizer_metadata(folder, arch, config["vocab_size"], config))
    assert [entry[0] for entry in have] == [entry[0] for entry in wanted]
    for mine, theirs in zip(have, wanted, strict=True):
        if mine[0] == TEMPLATES:  # the converter's come out of a set
            mine[-1].sort()
            theirs[-1].sort()
        assert mine == theirs, mine[0]


def test_smollm2(models: Path, tmp_path: Path) -> None:
    """The converter's keys; the same ids from llama.cpp, transformers and the files made again."""
    folder = models / "smollm2"
    config = json.loads((folder / "config.json").read_text())
    keys = tokenizer_metadata(folder, "llama", config["vocab_size"], config)
    [wanted] = _converted([(folder, tmp_path / "wanted.json")])
    assert _listed(keys) == wanted
    metadata = {"general.architecture": string("llama"), **keys}
    again = write_files(tokenizer_files(metadata), tmp_path / "again")
    assert forward(again, metadata) == keys
    ids = loaded(folder).encode(PAGE, add_special_tokens=False)
    assert loaded(again).encode(PAGE) == ids
    assert llama_ids(stored("llama-bpe"), keys, PAGE, tmp_path) == ids


@pytest.mark.parametrize(
    ("named", "arch"),
    [("Glm4MoeForCausalLM", "glm4moe"), ("GlmForCausalLM", "chatglm"),
     ("SolarOpenForCausalLM", "glm4moe")],
)  # fmt: skip
def test_tokens_that_only_the_converter_names(
    named: str, arch: str, rebuilt: Any, tmp_path: Path
) -> None:
    """GLM's, which its files do not call beginning, unknown, or end of a turn; Solar's."""
    folder = tmp_path / "files"
    shutil.copytree(rebuilt("llama-bpe"), folder)
    data = json.loads((folder / "tokenizer.json").read_text())
    size = len(stored("llama-bpe")["tokenizer.ggml.tokens"].value)
    plain_token = {**data["added_tokens"][0], "special": True}
    for text in ("<|endoftext|>", "[gMASK]", "<|user|>", "<|startoftext|>", "<unk>",
                 "<|observation|>"):  # fmt: skip
        data["added_tokens"].append({**plain_token, "id": size, "content": text})
        size += 1
    (folder / "tokenizer.json").write_text(json.dumps(data))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    config = {
        "architectures": [named], "model_type": "glm4_moe", "vocab_size": size,
        "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    [wanted] = _converted([(folder, tmp_path / "wanted.json")])
    assert _listed(tokenizer_metadata(folder, arch, size, config)) == wanted
    ends = [entry[3] for entry in wanted if "eom_token_id" in entry[0]]
    assert ends == ([size - 1] if named == "Glm4MoeForCausalLM" else [])

"""Opening and reading checkpoints: one file, shards, side files, and what is refused."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import FormatError, SourceError, UnsupportedError
from qtool.formats.safetensors_file import INDEX_NAME

A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.array([1.5, -2.0], np.float16)


def sharded(folder: Path, weight_map: Mapping[str, str] | None = None) -> None:
    save_file({"a": A}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": B}, folder / "model-00002-of-00002.safetensors")
    chosen = weight_map or {
        "b": "model-00002-of-00002.safetensors",
        "a": "model-00001-of-00002.safetensors",
    }
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": chosen}))


def test_one_file(tmp_path: Path) -> None:
    save_file({"b": B, "a": A}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.tensors["a"].shape == (2, 3) and checkpoint.tensors["b"].dtype == "F16"
    assert np.array_equal(checkpoint.float32("a"), A)
    assert checkpoint.float32("b").dtype == np.float32
    assert checkpoint.float32("b").tolist() == [1.5, -2.0]
    assert checkpoint.raw("b").tobytes() == B.tobytes()
    assert checkpoint.array("b").dtype == np.float16
    assert checkpoint.size_bytes == A.nbytes + B.nbytes
    assert checkpoint.file_of("a") == tmp_path / "model.safetensors"
    with pytest.raises(SourceError, match="has no tensor 'c'"):
        checkpoint.raw("c")


def test_a_bare_file_of_any_name(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"a": A}, path)
    checkpoint = Checkpoint.open(str(path))
    assert checkpoint.config == {} and list(checkpoint.tensors) == ["a"]
    assert Checkpoint.open(tmp_path).files == (path,)


def test_tensors_come_in_the_order_of_the_files(tmp_path: Path) -> None:
    sharded(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert list(checkpoint.tensors) == ["a", "b"]
    assert checkpoint.file_of("b").name == "model-00002-of-00002.safetensors"
    assert np.array_equal(checkpoint.float32("a"), A)


def test_shards_may_be_links_to_elsewhere(tmp_path: Path) -> None:
    store, folder = tmp_path / "store", tmp_path / "snapshot"
    store.mkdir()
    folder.mkdir()
    sharded(store)
    for path in store.iterdir():
        (folder / path.name).symlink_to(path)
    assert Checkpoint.open(folder).digest() == Checkpoint.open(store).digest()


def test_what_lies_below_the_place_of_a_linked_shard(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "model"
    (home / ".ssh").mkdir(parents=True)
    (home / "additional_chat_templates").mkdir()
    (home / ".ssh" / "id_rsa").write_text("a key")
    (home / "additional_chat_templates" / "t.jinja").write_text("{{ messages }}")
    folder.mkdir()
    sharded(home)
    for path in home.iterdir():
        if path.name != ".ssh":
            (folder / path.name).symlink_to(path)
    Checkpoint.open(folder)
    (folder / "tokenizer.txt").symlink_to(home / ".ssh" / "id_rsa")
    with pytest.raises(SourceError, match=r"tokenizer\.txt: a link to .*id_rsa, where no other"):
        Checkpoint.open(folder)


def test_a_missing_shard(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(SourceError, match=r"model-00002-of-00002.safetensors: named by .* missing"):
        Checkpoint.open(tmp_path)


def test_shards_without_an_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / INDEX_NAME).unlink()
    with pytest.raises(SourceError, match=r"2 safetensors files and no model.safetensors.index"):
        Checkpoint.open(tmp_path)


def test_a_tensor_in_two_shards_is_the_one_that_the_index_names(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"b": B, "a": A + 1}, tmp_path / "model-00002-of-00002.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert np.array_equal(checkpoint.float32("a"), A)
    save_file({"a": A, "x": A}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": B, "x": A}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(FormatError, match="x: in both"):
        Checkpoint.open(tmp_path)


def test_a_tensor_that_the_index_forgets_is_not_lost(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"b": B, "extra": A}, tmp_path / "model-00002-of-00002.safetensors")
    assert set(Checkpoint.open(tmp_path).tensors) == {"a", "b", "extra"}


def test_a_tensor_that_the_index_promises(tmp_path: Path) -> None:
    sharded(tmp_path, {"a": "model-00001-of-00002.safetensors",
                       "b": "model-00001-of-00002.safetensors"})  # fmt: skip
    with pytest.raises(FormatError, match="lacks 'b'"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "last.ckpt"])
def test_pickles_are_refused_with_the_way_out(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04.")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(SourceError, match=f"{name}: a Python pickle.*save_pretrained"):
            Checkpoint.open(path)
    save_file({"a": A}, tmp_path / "model.safetensors")  # the safe twin is taken
    assert list(Checkpoint.open(tmp_path).tensors) == ["a"]


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file or folder"):
        Checkpoint.open(tmp_path / "absent")
    with pytest.raises(SourceError, match=r"no \*.safetensors file here"):
        Checkpoint.open(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "x.gguf"):
        with pytest.raises(UnsupportedError, match="GGUF"):
            Checkpoint.open(path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SourceError, match="not weights; name a model's folder"):
        Checkpoint.open(tmp_path / "config.json")


def test_the_digest_is_of_the_weights_and_the_config(tmp_path: Path) -> None:
    digests = set()
    for change in ("", "weights", "config", "side", "name"):
        folder = tmp_path / f"x{change}"
        folder.mkdir()
        array = A + (change == "weights")
        save_file({"b" if change == "name" else "a": array}, folder / "model.safetensors")
        config = {"n": 1 if change == "config" else 0, "m": 2}
        (folder / "config.json").write_text(json.dumps(config, indent=len(change)))
        (folder / "README.md").write_text(change)
        digests.add(Checkpoint.open(folder).digest())
        if change == "side":
            assert len(digests) == 3  # the same as without the change
    assert len(digests) == 4 and all(len(digest) == 64 for digest in digests)


def test_side_files_are_a_positive_list(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    kept = ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
            "generation_config.json", "chat_template.jinja", "special_tokens_map.json",
            "modeling_custom.py", "LICENSE", "additional_chat_templates/tool.jinja"]  # fmt: skip
    left = ["config.json", "README.md", "optimizer.pt", "training_args.bin", "quantize_config.json",
            "qtool.json", "out/tokenizer.json", ".gitattributes", INDEX_NAME + ".bak"]  # fmt: skip
    for name in kept + left:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "config.json").write_text('{"auto_map": {}}')
    found = [path.as_posix() for path in Checkpoint.open(tmp_path).side_files]
    assert found == sorted(found) and set(found) == set(kept)
    (tmp_path / "config.json").write_text("{}")  # whose model needs no code of its own
    assert set(kept) - {p.name for p in Checkpoint.open(tmp_path).side_files} >= {
        "modeling_custom.py"
    }


def test_an_integer_tensor_is_not_read_as_weights(tmp_path: Path) -> None:
    save_file({"ids": np.arange(3)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(UnsupportedError, match="ids: expected weights in F32"):
        checkpoint.float32("ids")
    assert checkpoint.array("ids").tolist() == [0, 1, 2]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")
def test_nothing_is_memory_mapped(tmp_path: Path) -> None:
    save_file({"a": np.zeros(1 << 20, np.float32)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    kept = checkpoint.float32("a")
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    kept += 1  # fresh memory, to do with as one likes
    assert not checkpoint.float32("a").any()

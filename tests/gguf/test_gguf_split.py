"""GGUF models in several files: opened from any part, refused where parts do not belong."""

import gc
import os
import resource
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from qtool.errors import FormatError, SourceError
from qtool.formats import gguf_file
from qtool.formats.gguf_file import GgufFile, first_parts
from qtool.formats.gguf_values import Kind
from support.gguf.gguf_bytes import Gguf, entry, info
from support.gguf.gguf_split import split


def test_split_opens_from_any_part(tmp_path: Path) -> None:
    files = split(tmp_path)
    for path in files:
        with GgufFile.open(path) as file:
            assert file.path == files[0] and file.files == tuple(files)
            assert list(file.tensors) == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"]
            assert file.metadata["general.architecture"].value == "llama"
            assert file.size_bytes == sum(part.stat().st_size for part in files)
            for number in range(3):
                assert file.tensors[f"{number}.1"].file == files[number]
                row = file.read_rows(f"{number}.1", 0, 1).view(np.float32)
                assert row[0].tolist() == [100 * number + 8 + i for i in range(8)]


def test_split_of_the_package(tmp_path: Path) -> None:
    """gguf's own writer splits too; its reader says what each part holds."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    weights = {f"t{i}": np.full((4, 8), i, np.float16) for i in range(5)}
    for name, weight in weights.items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) == 3
    with GgufFile.open(parts[1]) as file:
        assert list(file.tensors) == list(weights)
        for name, weight in weights.items():
            assert file.read_rows(name, 0, 4).tobytes() == weight.tobytes()


def _rewrite(path: Path, **changes: Any) -> None:
    number, count = int(path.name[4:9]) - 1, 3
    given: dict[str, Any] = {"no": number, "count": count, "tensors": 6} | changes
    kinds = {"no": Kind.UINT16, "count": Kind.UINT16, "tensors": Kind.INT32}
    entries = [
        entry("split." + key.replace("tensors", "tensors.count"), kinds[key], value)
        for key, value in given.items()
        if key in kinds and value is not None
    ]
    names = given.get("names", (f"{number}.0", f"{number}.1"))
    infos = [info(name, [1, 8], offset=32 * i) for i, name in enumerate(names)]
    path.write_bytes(bytes(Gguf(entries, infos, bytes(64))))


def test_split_refusals(tmp_path: Path) -> None:
    def refused(message: str, part: int = 0, error: type[Exception] = FormatError) -> None:
        with pytest.raises(error, match=message):
            GgufFile.open(files[part])

    files = split(tmp_path)
    files[1].unlink()
    refused(r"of which 1 is not beside it: big-00002-of-00003\.gguf; fetch", error=SourceError)
    split(tmp_path)
    _rewrite(files[1], no=2)
    refused("00002-of-00003.gguf: split.no and split.count are 2 and 3, expected 1 and 3")
    _rewrite(files[1], count=4)
    refused("split.no and split.count are 1 and 4, expected 1 and 3")
    refused("one of 4 parts of a model, which must be called", part=1)
    _rewrite(files[1], count=None)
    refused("split.no and split.count are 1 and -1, expected 1 and 3")
    _rewrite(files[1], names=("1.0", "0.1"))
    refused("00002-of-00003.gguf: the tensor '0.1' is in big-00001-of-00003.gguf already")
    _rewrite(files[1], names=("1.0",))
    refused("split.tensors.count is 6, and the 3 parts have 5")
    _rewrite(files[1])
    _rewrite(files[0], tensors=-6)
    refused("split.tensors.count is -6, expected a count")
    _rewrite(files[0])
    GgufFile.open(files[2]).close()
    stranger = tmp_path / "big-00004-of-00003.gguf"
    stranger.write_bytes(files[0].read_bytes())
    with pytest.raises(FormatError, match="must be called NAME-00001-of-00003"):
        GgufFile.open(stranger)
    _rewrite(files[0], count=1001)
    refused("one of 1001 parts; at most 1000 are read")
    _rewrite(files[0])
    renamed = files[0].rename(tmp_path / "model.gguf")
    with pytest.raises(FormatError, match="must be called NAME-00001-of-00003"):
        GgufFile.open(renamed)


def test_parts_count_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many parts may not cost more than one file may."""
    files = split(tmp_path)
    monkeypatch.setattr(gguf_file, "MAX_TENSORS", 5)
    with pytest.raises(FormatError, match=r"00003-of-00003\.gguf: 6 tensors and .* at most 5 and"):
        GgufFile.open(files[0])
    monkeypatch.setattr(gguf_file, "MAX_TENSORS", 6)
    GgufFile.open(files[0]).close()
    monkeypatch.setattr(gguf_file, "MAX_HEADER_BYTES", 400)
    with pytest.raises(
        FormatError, match=r"00002-of-00003\.gguf: 4 tensors and .* and 400 are read"
    ):
        GgufFile.open(files[0])


def test_more_parts_than_files_may_be_open(tmp_path: Path) -> None:
    files = split(tmp_path)
    free = [os.open(files[0], os.O_RDONLY) for _ in range(3)]  # other tests may leave gaps
    for descriptor in free:
        os.close(descriptor)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[2], hard))
    try:
        with pytest.raises(SourceError, match=r"00003\.gguf.*beside 2 parts.*`ulimit -n`"):
            GgufFile.open(files[0])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    GgufFile.open(files[0]).close()


def test_the_name_of_a_split_alone_makes_no_split(tmp_path: Path) -> None:
    path = tmp_path / "m-00002-of-00003.gguf"
    path.write_bytes(bytes(Gguf()))
    with GgufFile.open(path) as file:
        assert file.files == (path,)


def test_first_parts(tmp_path: Path) -> None:
    names = ["a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "c-00002-of-00002.gguf"]
    assert [p.name for p in first_parts(map(Path, names))] == [names[0], names[1], names[3]]


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    files = split(tmp_path)

    def opened() -> int:
        return sum(os.readlink(f"/proc/self/fd/{n}").startswith(str(tmp_path)) for n in numbers())

    def numbers() -> list[str]:
        return [n for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")]

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc")
    file = GgufFile.open(files[0])
    assert opened() == 3
    file.close()
    file.close()
    assert opened() == 0
    with pytest.raises(ValueError, match="has been closed"):
        file.read_rows("0.0", 0, 1)
    file = GgufFile.open(files[0])
    del file
    gc.collect()
    assert opened() == 0
    files[2].unlink()
    with pytest.raises(SourceError):
        GgufFile.open(files[0])
    assert opened() == 0

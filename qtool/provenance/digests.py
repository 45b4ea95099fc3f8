"""The SHA-256 of an artifact's files, in its own qtool.json:

    "files": {"config.json": "sha256:...", "model.safetensors": "sha256:...", ...}

A bit that turns in a code or a scale makes another weight, which no rule of a format tells from the
right one. Of qtool.json itself it says nothing, nor of the card, which people write in.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from qtool.checkpoints.checkpoint import hash_file
from qtool.formats.safetensors_header import read_json
from qtool.record import CARD, FILE_NAME, FILES


def add_digests(folder: Path, threads: int = 1) -> None:
    """Put them into the qtool.json of a folder, all else in which is written. Reads every file."""
    target = folder / FILE_NAME
    record = read_json(target)
    own = {target, folder / CARD}
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path not in own)
    with ThreadPoolExecutor(max(1, threads)) as pool:
        digests = [f"sha256:{one}" for one in pool.map(hash_file, paths)]
    names = [path.relative_to(folder).as_posix() for path in paths]
    record[FILES] = dict(sorted(zip(names, digests, strict=True)))
    target.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

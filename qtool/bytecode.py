"""Bytecode that Python kept and cannot read: cut off by a full disk, it fails every later run.

Python takes a .pyc by its first 16 bytes, which say of which source it is; what is missing behind
them is an EOFError, or another error of marshal, wherever the module is imported.
"""

from pathlib import Path

ERRORS = (EOFError, ValueError, TypeError)  # of marshal


def damaged(error: BaseException) -> str | None:
    """What to do, where an error is of such a file; None for all other errors."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or last.tb_frame.f_code.co_name != "_compile_bytecode":
        return None
    path = last.tb_frame.f_locals.get("bytecode_path")
    if not last.tb_frame.f_code.co_filename.startswith("<frozen importlib") or not path:
        return None
    return (
        f"{path}: Python kept this file damaged, as where the disk was full; remove the folder "
        f"{Path(path).parent}, which Python makes anew"
    )

"""What lies there in place of a file that was to be fetched, and what is wrong with JSON."""

import json
import re

_POINTER = b"version "  # as a pointer of Git LFS begins
_WORD = re.compile(r"[\w.+-]*\s*")  # a number, or a word such as true, or nothing
_BLANKS = b"\xef\xbb\xbf \t\r\n"  # before a page, with the mark of UTF-8


def instead_of(head: bytes) -> str | None:
    """What a file is by its first 8 bytes, with what to do, or None: nobody can say."""
    begun = head.lstrip(_BLANKS)
    if not begun:
        return None if head else "it is empty: fetch it again"
    if begun.startswith(_POINTER):
        return "a pointer of Git LFS, not the file itself; run `git lfs pull` there"
    if begun.startswith(b"<"):
        return "a web page, not the file itself; download it again, and log in where that is asked"
    return None


def no_weights(head: bytes) -> str | None:
    """The same of a file of weights, which is no text at all."""
    if head.lstrip(_BLANKS).startswith(b"{"):
        return "JSON, such as a server's refusal, not the file itself; download it again"
    return instead_of(head)


def why_not(data: bytes, error: ValueError) -> str:
    """Why bytes are no JSON: what they are in its place, or where it ends or goes wrong."""
    if (other := instead_of(data[:64])) is not None:
        return other
    if data.startswith(b"\xef\xbb\xbf"):
        return "it begins with the mark of UTF-8, which JSON has not: save it without"
    if isinstance(error, json.JSONDecodeError):
        cut = error.msg.startswith("Unterminated") or _WORD.fullmatch(error.doc, error.pos)
        if cut:
            return f"it ends in the middle, at line {error.lineno}: fetch it again"
    return str(error)


def kind_of(value: object) -> str:
    """What a value of JSON is called there."""
    names = {bool: "true or false", str: "a string", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), "a number")

"""Lies for the fuzzers: what a JSON text, a container with such a header, or any bytes can say.

Each function takes honest bytes and a `random.Random`, and gives them back with a lie more. Values
are those at which readers have gone wrong.
"""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

Lie = Callable[[bytes, random.Random], bytes]

VALUES: list[Any] = [
    *(0, 1, -1, 2, 3, 4, 7, 8, 16, 32, 33, 64, 128, 255, 256, 65535, 2**31 - 1, 2**31, 2**32),
    *(2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 10**30, -(2**63), 0.0, -0.0, 0.5, 1.5, 1e-300, 1e308),
    *(float("nan"), float("inf"), -float("inf"), True, False, None, "", "a", "0", "1e9", "\0"),
    *("\ud800", "\U0001f600", "../../x", "/etc/passwd", "..\\x", "a\nb", "\x1b[2J", "\u202ea"),
    *("x" * 300, "re:(a+)+$", "re:[", "re:.*", ".*", "float8_e4m3fn", "bfloat16", "gptq", "awq"),
    *([], {}, [[]], [None], [0] * 5, [1, 2], [""], {"": 0}, {"a": {}}, [{}], {"type": "Sequence"}),
]


def parse(data: bytes) -> Any:
    """What a text says, or None where it is no JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """(container, key or index) of everything inside."""
    if isinstance(value, dict):
        found += [(value, key) for key in value]
        for inner in value.values():
            _places(inner, found)
    elif isinstance(value, list):
        found += [(value, index) for index in range(len(value))]
        for inner in value[:40]:
            _places(inner, found)
    return found


def lie_in(value: Any, choose: random.Random) -> Any:
    """A value of JSON with one place in it changed."""
    places = _places(value, [])
    if not places:
        return _fresh(choose)
    holder, key = choose.choice(places)
    kind = choose.randrange(10)
    if kind <= 3:
        holder[key] = _fresh(choose)
    elif kind == 4:
        del holder[key]
    elif kind == 5:
        other, there = choose.choice(places)
        holder[key] = copy.deepcopy(other[there])
    elif kind == 6 and isinstance(holder, dict):
        new = choose.choice(["", "a", "\ud800", "../x", "re:.*", "__metadata__", str(key) + "2"])
        holder[new] = holder.pop(key)
    elif kind == 7:
        deep: Any = holder[key]
        for _ in range(choose.choice([1, 3, 90, 200])):
            deep = [deep] if choose.random() < 0.5 else {"a": deep}
        holder[key] = deep
    elif kind == 8 and isinstance(holder, list):
        holder.insert(choose.randrange(len(holder) + 1), _fresh(choose))
    elif isinstance(holder[key], int) and not isinstance(holder[key], bool):
        holder[key] += choose.choice([-1, 1, 8, -8, 2**31, 2**32])
    else:
        holder[key] = _fresh(choose)
    return value


def _fresh(choose: random.Random) -> Any:
    """One of the values, of which later lies may change the copy."""
    return copy.deepcopy(choose.choice(VALUES))


# Of what little text becomes much in memory.
DENSE = ["[],", "{},", "[[]],", '{"a":1},', "[0],", '"ab",', "999,", "1e1,", '{"a":[]},']


def dense(data: bytes, choose: random.Random, most: int) -> bytes:
    """A JSON object with a value that is as much as fits into `most` bytes."""
    value = parse(data)
    inner = choose.choice(DENSE)
    size = int(most ** choose.uniform(0.8, 1)) - len(data) - 20
    text = f'"a":[{inner * (size // len(inner))}0]'
    honest = json.dumps(value)[1:-1] if isinstance(value, dict) else ""
    return f"{{{', '.join(filter(None, (honest, text)))}}}".encode()


def json_lie(data: bytes, choose: random.Random, most: int = 50_000) -> bytes:
    """A JSON text with values changed, or with the text itself damaged, or made long."""
    if choose.random() < 0.04:
        return dense(data, choose, most)
    value = parse(data)
    if value is None or choose.random() < 0.1:
        return byte_lie(data, choose)
    for _ in range(choose.choice([1, 1, 1, 2, 4])):
        value = lie_in(value, choose)
    try:
        text = json.dumps(value)
    except RecursionError:
        return data
    if choose.random() < 0.1 and isinstance(value, dict) and value:
        key = choose.choice(list(value))
        again = json.dumps({key: choose.choice(VALUES)})
        text = again[:-1] + ", " + text[1:]
    if choose.random() < 0.05:
        text = choose.choice(["\ufeff" + text, text + "\n", text * 2, text + " " * 1000])
    return text.encode("utf-8", "surrogatepass")


def contained(data: bytes, choose: random.Random, most: int = 50_000) -> bytes:
    """A safetensors file: its header's values, its length, or its bytes."""
    kind = choose.randrange(12)
    if len(data) < 8 or kind == 0:
        return byte_lie(data, choose)
    length = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + length], data[8 + length :]
    if kind == 1:
        numbers = [0, 1, 2, length - 1, length + 1, len(data), 2**31, 2**63, 2**64 - 1]
        return (choose.choice(numbers) % 2**64).to_bytes(8, "little") + data[8:]
    if kind == 2:
        return data[: 8 + length] + byte_lie(rest, choose)
    header = json_lie(header, choose, most)
    if kind == 3:
        rest = rest[: choose.randrange(len(rest) + 1)] + bytes(choose.choice([0, 1, 64]))
    return len(header).to_bytes(8, "little") + header + rest


def byte_lie(data: bytes, choose: random.Random) -> bytes:
    """Any bytes with some flipped, lost, doubled, moved or made up."""
    raw = bytearray(data or b"\0")
    for _ in range(choose.choice([1, 1, 2, 5])):
        at = choose.randrange(len(raw) + 1)
        length = choose.choice([1, 1, 2, 4, 8, 30])
        kind = choose.randrange(7)
        if kind == 0:
            raw[at : at + 1] = bytes([choose.randrange(256)])
        elif kind == 1 and at < len(raw):
            raw[at] ^= 1 << choose.randrange(8)
        elif kind == 2:
            del raw[at : at + length]
        elif kind == 3:
            raw[at:at] = raw[at : at + length] * choose.choice([1, 2, 50])
        elif kind == 4:
            start = choose.randrange(len(raw) + 1)
            raw[at : at + length] = raw[start : start + length]
        elif kind == 5:
            raw[at:at] = choose.choice(WORDS)
        elif choose.random() < 0.2:
            del raw[at:]
    return bytes(raw)


WORDS = [
    *(b"[", b"{", b"]", b"}", b'"', b",", b":", b"\0", b"\xff", b"\xef\xbb\xbf", b"\\ud800"),
    *(b"\n", b"\r\n", b"- ", b"? ", b"&a ", b"*a", b"!!python/object:x ", b"|", b">", b"%", b"'"),
    *(b"#", b"---\n", b"...\n", b"\t", b'"\\UFFFFFFFF"', b"0x", b"1e9999", b"-1", b"9" * 30),
    *(b"[" * 200, b"{a: " * 200, b"- " * 200, b"(" * 50, b"NaN", b"Infinity", b"null", b"true"),
]

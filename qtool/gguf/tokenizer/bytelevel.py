"""Byte-level text: how BPE vocabularies of GPT-2's family spell bytes.

Each of the 256 bytes has a printable character: itself where it is one, else the next free one from
U+0100 on. A space is U+0120, a line feed U+010A. Source: the encoder of OpenAI's GPT-2.
"""

from collections.abc import Iterator


def _alphabet() -> Iterator[tuple[int, str]]:
    following = 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            yield byte, chr(byte)
        else:
            yield byte, chr(following)
            following += 1


CHARACTER = dict(_alphabet())  # byte -> character
BYTE = {character: byte for byte, character in CHARACTER.items()}


def spell(text: str) -> str:
    """The byte-level spelling of a text."""
    return "".join(CHARACTER[byte] for byte in text.encode())


def read(token: str) -> str:
    """The text of one token, as the tokenizers library decodes it alone.

    A token with a character outside the alphabet stands for its own text.
    """
    if any(character not in BYTE for character in token):
        return token
    return bytes(BYTE[character] for character in token).decode(errors="replace")

"""Text from a file, made safe to show."""


def printable(text: str) -> str:
    """Text with everything escaped that could move a terminal's cursor or change its colours."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)

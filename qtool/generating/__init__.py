"""A few tokens from an artifact: whether it still speaks."""

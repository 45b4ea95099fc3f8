"""Transforms rewrite the float weights of a block without changing what it computes."""

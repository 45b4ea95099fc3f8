"""Texts, and inputs of matrices."""

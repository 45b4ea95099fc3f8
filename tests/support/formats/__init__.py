"""Artifacts and matrices in every format."""

"""Broken artifacts, each broken the way real ones were, made from small healthy ones."""

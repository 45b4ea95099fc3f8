"""Recipes: YAML files that say what to do to a model."""

"""Evaluating and generating."""

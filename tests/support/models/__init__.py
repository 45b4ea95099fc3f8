"""Small checkpoints and tokenizers."""

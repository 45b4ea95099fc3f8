"""What the kernels have to give, by definition, and what they are given."""

"""Slopes of the model's loss: by what each block gives, and by what each matrix loses."""

"""What an artifact is, for those who find it: its model card, and how engines load it."""

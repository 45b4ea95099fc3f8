"""What will happen to every source tensor, and what that will need."""

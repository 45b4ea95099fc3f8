"""What methods of quantizing have to give."""

"""What is said to people: sentences, tables, and progress while work goes on."""

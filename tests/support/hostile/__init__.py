"""Files that lie, one for each way: made by code, given to a command, answered by a sentence."""

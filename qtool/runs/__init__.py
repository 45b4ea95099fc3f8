"""One run of a command: what was asked, its working folder and journal, and what it leaves."""

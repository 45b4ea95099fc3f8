"""Where an output is made: a hidden folder beside it, with a journal, so that a killed run goes on.

workspace   the folder, asked for and given back     journal     what is finished, line by line
lock        one process at a time                    staging     whole, or not there
naming      the last step: the output's name         already     when a run died just after it
differences why it is not the same run               replacing   an earlier output's place
watched     what has to stay as it is meanwhile      leftovers   swept, so that a name is free
"""

"""Texts and chats to calibrate on or to measure on, and their tokens.

source.py     what a name stands for, and its texts and chats, some at a time
stored.py     kinds of files by their names, and their bytes, compressed or not
records.py    what lines of JSON and CSV say; parquet.py: what rows of Parquet do
chats.py      chats as a model's template writes them
datasets.py   files of hub datasets
mixture.py    several of them in stated shares
tokenizing.py, encoding.py
              ids of texts, some at a time
calibration.py
              the samples that a run is calibrated on
"""

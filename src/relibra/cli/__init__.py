"""The command line: one verb per file, thin over the public functions.

In: command-line words. Out: printed text or JSON, written files, exit codes. Open `main.py` first; `inputs/` turns
words into frozen requests and reads what they name, `outputs/` checks and writes files, `terminal.py` formats text.
"""

"""Output shared by several commands: checks of output paths (no input is overwritten), and the page of a plan.

In: values of the library and paths from the command line. Out: checked paths, written files. Open `files.py` first.
"""

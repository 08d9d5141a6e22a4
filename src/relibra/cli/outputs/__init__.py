"""What several verbs write: files that destroy no input, and the page of a plan.

In: values of the library and paths from the command line. Out: checked paths, written files. Open `files.py` first.
"""

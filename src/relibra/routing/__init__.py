"""Recorded expert choices: traces, their files, the demand counted from them, and statistics. Imports no torch."""

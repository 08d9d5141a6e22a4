"""Tasks with rewards that a program can check."""

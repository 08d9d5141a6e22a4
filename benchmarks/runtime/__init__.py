"""Plans executed on processes and on a GPU."""

"""How other programs write arrays: JSON, safetensors, pickles, torch archives.

Each file turns bytes into arrays or plain values, checks sizes before it allocates, and runs nothing that a file names.
"""

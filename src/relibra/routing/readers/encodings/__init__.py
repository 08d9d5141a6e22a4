"""How other programs write arrays: base64 text, long texts in JSON, safetensors, pickles, torch archives, MessagePack.

Each file turns bytes into numpy arrays or plain values, checks sizes before it allocates, and runs nothing that a file
names.
"""

"""Programs that measure relibra on this machine: `relibra bench NAME`, or `python benchmarks NAME`.

In: recorded or synthetic routes, sizes. Out: rows in results/*.json with machine, commit and command, from which
`render.py` writes the pages of docs/. Open `programs.py` first: it lists every program and its minutes.
"""

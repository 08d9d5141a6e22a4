"""Configuration of a run. In: a TOML file and overrides. Out: `RunConfig`, one frozen section per stage.

`settings.py` explains every setting (start there). `run_config.py` reads them and fills in what was not given,
from the top of `_fill_in` down; `rules.py` holds what does not fit together, `removed.py` the names of earlier
versions. Imports no torch.
"""

"""Configuration of a run: settings, presets, TOML files. No torch in here.

Start with `settings.py`.
"""

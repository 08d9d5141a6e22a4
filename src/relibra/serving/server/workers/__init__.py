"""Workers as the front sees them: samples go to them, progress comes back, and who ends or hangs is noticed."""

"""Workers as the API server sees them: they get choices, return progress, and are replaced where they end or hang."""

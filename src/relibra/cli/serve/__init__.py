"""`relibra serve`: search a deployment, and serve a model with it."""

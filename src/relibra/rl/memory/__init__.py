"""Memory of a training step, known before a weight is read: a dry run of the real step on a device without data."""

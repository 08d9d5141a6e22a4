"""Programs that measure serving with attention and experts apart."""

"""What all programs share: options, result files, where figures come from."""

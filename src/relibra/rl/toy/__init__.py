"""What the demo needs and no other run does: built-in tasks and supervised warm-up."""

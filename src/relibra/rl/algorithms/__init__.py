"""What is learned from sampled tokens: pure functions of tensors. They know of no model, no rank and no setting."""

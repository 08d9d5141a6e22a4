"""What several verbs read from their arguments: workload, simulated step, pages."""

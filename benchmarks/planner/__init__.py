"""The planner and other balancers: skew, bounds, planning time."""

"""Tables of papers, recomputed with our balancers in the simulator."""

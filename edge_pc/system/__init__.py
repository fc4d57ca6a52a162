"""The machine and the environment that edge_pc runs in."""

"""fleets: a trace over simulated nodes: who serves which request, from where, over which wires, and when.

It measures nothing: what things cost comes from fleet_costs.toml.
"""

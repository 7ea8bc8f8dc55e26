"""Costs in, plans out: predicted times of a site, symbolic cost, fits, batch plans and stream schedules.

Nothing here imports `graphopt.passes` or the public surface of `graphopt`.
"""

"""The reusable core: torch modules as sharded, compiled JAX programs.

Here itself only what every room may use: versions, arrays, reports, and
the words that settings may be. All else is in a room.
Order of the rooms, lowest first: mesh, files, tracing, layers, weights, spec, programs,
run, cost, plan.
"""

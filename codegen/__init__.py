"""A spec in, a kernel out.

In: a frozen `KernelSpec`.  Out: readable Triton source, the operators that call it on a GPU, and the plain-torch
reference that is their oracle and their CPU implementation.  Nothing here imports `graphopt.passes` or the public
surface of `graphopt`.
"""

"""Layer streaming: weights and optimizer state in host memory, one layer at a time on the device.

In: a model and a device.  Out: the same model with handles in place of its layers' weights; `torch.compile(model,
backend="graphopt")` then runs it layer by layer, and `HostAdamW` updates it on the CPU.
"""

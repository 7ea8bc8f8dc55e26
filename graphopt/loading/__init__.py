"""A plan and a data set in, collated microbatches out: what runs a batch plan inside a training loop.

`loader.py` is what users see; `sampler.py` says which samples come next, `position.py` where a job stands in its plans,
`dataset.py` fetches in the workers and replaces what is corrupt, `agreement.py` compares ranks at the start, and
`accumulate.py` runs unequal numbers of microbatches under FSDP2 and DDP.
"""

"""Products of tokens and large weights, with what follows them.

Not here: products that XLA makes about as fast, with weights that fit VMEM.
May import: the hall of the kernels.
"""

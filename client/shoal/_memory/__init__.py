"""Memory of a process: the allocator's settings, the garbage collector, and a pool of buffers.

It does not know variables or connections. Every package may import its modules by their own names. The allocator is
tuned before NumPy and gRPC are loaded, so this package itself imports nothing.
"""

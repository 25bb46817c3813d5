"""Memory of a process: the allocator's settings, the garbage collector, and buffers that are lent and used again.

Knows nothing of variables or connections. Every package may import its modules, by their own names: the allocator is
set before NumPy and gRPC are loaded, so this package loads nothing itself.
"""

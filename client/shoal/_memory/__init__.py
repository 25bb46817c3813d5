"""Memory of a process: the allocator's settings, the garbage collector, and a pool of buffers.

It does not know variables or connections. The allocator is tuned before NumPy and gRPC are loaded, so this file imports
and exports nothing. Every package may import the modules of this one directly, such as `shoal._memory.buffers`.
"""

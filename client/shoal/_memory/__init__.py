"""Memory of a process: the allocator, the garbage collector, and buffers that are lent and used again."""

"""Update rules, and the compiled kernels that apply them to arenas on idle cores.

Users choose optimizers in `shoal.optim`. `shoal_server.shards` and `shoal_server.serving` import this package.
"""

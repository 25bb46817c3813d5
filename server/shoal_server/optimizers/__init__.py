"""Update rules, and the compiled kernels that apply them to arenas on the cores that are idle.

What users name is in `shoal.optim`. `shoal_server.shards` and `shoal_server.serving` import it.
"""

"""The parameter server: shards of variables, and what changes them."""

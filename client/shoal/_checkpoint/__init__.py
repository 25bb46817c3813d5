"""Checkpoints: what lies in their files, where the files lie, and how they are written so that what is there is whole.

`tensors` is one file, `manifest` what a checkpoint consists of, `folders` and `object_store` where it lives,
`catalogue` finds it, `slices` any part of it.
"""

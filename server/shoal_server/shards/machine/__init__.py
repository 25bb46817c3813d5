"""The pure state machine of a job's shards on one server: its events and effects, and the consistency modes.

`GroupState` takes events and returns effects. It has no locks, no clock and no values: `shoal_server.shards` holds the
values and carries out the effects.
"""

"""The vocabulary of the state machine: events, their answers, and effects."""

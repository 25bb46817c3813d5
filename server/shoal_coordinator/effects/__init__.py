"""What performs effects: calls to servers, and files of checkpoints."""

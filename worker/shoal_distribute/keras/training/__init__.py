"""Training of models: the loops, their callbacks and their batches."""

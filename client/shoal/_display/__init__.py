"""What people read: records, progress, and event files of TensorBoard."""

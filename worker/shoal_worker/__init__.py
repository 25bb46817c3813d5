"""The worker: a daemon beside a device, and the trainer that it starts for each job."""

"""What Shoal asks of its surroundings: optional packages, files, folders, and which host this is."""

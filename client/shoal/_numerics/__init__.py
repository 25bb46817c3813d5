"""Numbers: element types, random numbers by seed and name, and compiled kernels."""

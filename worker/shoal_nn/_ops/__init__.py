"""Numerical operations that layers share: convolutions, windows, special functions."""

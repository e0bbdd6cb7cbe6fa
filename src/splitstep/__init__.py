"""Transformers as numerical solvers of an ordinary differential equation."""

__version__ = "0.1.0"

"""Arithmetic and wire layout of the compressed exchange: tensors in, tensors out."""

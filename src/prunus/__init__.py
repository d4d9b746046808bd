"""Prunus trains neural networks to a budget."""

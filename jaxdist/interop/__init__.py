"""Weights, configs and vocabularies in the formats of others."""

"""Headrace: disaggregated LLM serving. Importing this package imports nothing else, so that the cores stay light."""

__version__ = "0.1.0"

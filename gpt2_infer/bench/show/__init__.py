"""Presentation of results: tables, charts, sections of documents, and an HTML report."""

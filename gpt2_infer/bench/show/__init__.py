"""Results as a reader sees them: tables, charts, the sections of documents, and a page."""

"""Is a kernel right? The reference and its budgets, what is tried, the suite, its process."""
